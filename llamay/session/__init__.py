"""Conversations as trees of turns that outlive the process."""

from llamay.session.leaving import Goodbye
from llamay.session.records import Settings
from llamay.session.session import Session
from llamay.session.states import Figures, PageCell, Where

__all__ = ["Figures", "Goodbye", "PageCell", "Session", "Settings", "Where"]
