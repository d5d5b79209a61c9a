"""The method registry. Every module of this folder is imported once; a new method needs no list to be edited."""

from __future__ import annotations

import importlib
import pkgutil

from kvfactory.methods.base import KVCluster
from kvfactory.registry import Registry

METHODS: Registry[type[KVCluster]] = Registry("method")


def register(name: str):
    """Decorator that files a `KVCluster` subclass under its canonical name."""

    def add(cls: type[KVCluster]) -> type[KVCluster]:
        if not issubclass(cls, KVCluster):
            raise TypeError(f"method {name} must subclass KVCluster")
        cls.name = name
        return METHODS.register(name)(cls)

    return add


for _module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
