"""kvfactory: every published KV-cache reduction method on the same model, prompts, budget and byte count."""

from kvfactory.version import __version__

__all__ = ["__version__"]
