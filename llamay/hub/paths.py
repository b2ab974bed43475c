"""Folders on this machine: llamay's own and those of other programs that keep models."""

import os
import sys
from pathlib import Path


def data_dir() -> Path:
    """llamay's folder for what the user would miss: `$LLAMAY_HOME`, else the platform's."""
    if home := os.environ.get("LLAMAY_HOME"):
        return Path(home).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "llamay"
    return _xdg("XDG_DATA_HOME", ".local/share") / "llamay"


def cache_dir() -> Path:
    """llamay's folder for what can be computed again."""
    if os.environ.get("LLAMAY_HOME"):
        return data_dir() / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llamay"
    return _xdg("XDG_CACHE_HOME", ".cache") / "llamay"


def models_dir() -> Path:
    """llamay's own store of models."""
    return data_dir() / "models"


def ollama_dirs() -> list[Path]:
    """Folders in which Ollama keeps manifests and blobs: the user's, then the system service's."""
    if models := os.environ.get("OLLAMA_MODELS"):
        return [Path(models).expanduser().absolute()]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def hugging_face_dir() -> Path:
    """The Hugging Face cache, by the variables that its own client reads."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser().absolute()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser().absolute() / "hub"
    return _xdg("XDG_CACHE_HOME", ".cache") / "huggingface" / "hub"


def lm_studio_dirs() -> list[Path]:
    """LM Studio's folders of models: the present one, then that of its early versions."""
    return [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]


def _xdg(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    # The XDG specification has relative values ignored.
    return Path(value) if os.path.isabs(value) else Path.home() / fallback
