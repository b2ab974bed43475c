"""A model that answers: requests from any thread, one thread of its own for all array work."""

from llamay.engine.branch import Branch
from llamay.engine.engine import Engine
from llamay.engine.generation import Generation, Listener, Request
from llamay.engine.model import Model
from llamay.engine.scheduler import Counters

__all__ = ["Branch", "Counters", "Engine", "Generation", "Listener", "Model", "Request"]
