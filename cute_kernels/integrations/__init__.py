"""Drop-ins for existing callers: flash_mla, fish_speech, transformers. Each is imported when it is first asked for."""

import importlib

__all__ = ["fish_speech", "flash_mla", "transformers"]


def __getattr__(name: str):
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
