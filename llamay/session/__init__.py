"""Conversations as trees of turns that outlive the process."""
