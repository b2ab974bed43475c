"""GGUF metadata to a decoder's description, and that to a program for the kernels."""
