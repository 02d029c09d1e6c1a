"""The course's interactives. Each is imported on first use: `import cbref` stays light."""

from importlib import import_module

_HOME = {  # class: module
    "BatchingWidget": "batching",
    "Blocks": "blocks",
    "Quiz": "quiz",
    "Race": "race",
    "Roofline": "roofline",
    "Stall": "stall",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
