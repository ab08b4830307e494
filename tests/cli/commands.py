"""The commands of `bin/` in this process: each call of `main` with flags as in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator

from absl import flags

# The modules that define each command's flags.
MODULES = {
    "train": ("train", "experiment_flags"),
    "prepare": ("prepare",),
    "embed": ("embed", "model_flags", "bulk"),
    "evaluate": ("evaluate", "model_flags", "after_embedding"),
    "index": ("index",),
    "export": ("export", "export_gallery"),
}


class Commands:
    """Every command, with the flags that it defines; the commands share names, so that only one's are in force."""

    def __init__(self):
        self._flags: dict[str, list[flags.Flag]] = {}
        with _own_flags_put_aside():
            for modules in MODULES.values():
                for module in modules:
                    importlib.import_module(f"tfdml.cli.{module}")
                for name, members in _defined().items():
                    self._flags.setdefault(name, members)
                _remove()
            # A module that another test had imported before has defined its flags then.
            for module in {module for modules in MODULES.values() for module in modules}:
                if f"tfdml.cli.{module}" not in self._flags:
                    imported = importlib.import_module(f"tfdml.cli.{module}")
                    importlib.reload(imported)
                    self._flags.update(_defined())
                    _remove()

    def flags(self, command: str) -> list[flags.Flag]:
        """The flags of a command."""
        return [flag for module in MODULES[command] for flag in self._flags[f"tfdml.cli.{module}"]]

    def effects(self, command: str):
        """Which flags of a command have an effect."""
        return importlib.import_module(f"tfdml.cli.{command}").EFFECTS

    def run(self, command: str, *arguments: str) -> tuple[int, str, str]:
        """Call a command's `main`: its exit status, and what it printed to either stream.

        An exception that leaves `main` is a traceback to a user, and is raised.
        """
        with _own_flags_put_aside():
            for module in MODULES[command]:
                for flag in self._flags[f"tfdml.cli.{module}"]:
                    flag.unparse()
                    flags.DEFINE_flag(flag, module_name=f"tfdml.cli.{module}")
            main = importlib.import_module("tfdml.cli.main")
            entry = importlib.import_module(f"tfdml.cli.{command}")
            out, err = io.StringIO(), io.StringIO()
            status = 0
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    main.run(
                        getattr(entry, command),
                        command,
                        entry.USAGE,
                        [command, *arguments],
                        getattr(entry, "FLAG_OF", None),
                        effects=self.effects(command),
                    )
                except SystemExit as end:
                    status = end.code
            return status, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _own_flags_put_aside() -> Iterator[None]:
    """absl's own flags alone, not parsed; afterwards those of tfdml that were there before."""
    values = flags.FLAGS
    before, parsed = _defined(), values.is_parsed()
    _remove()
    values.unparse_flags()
    try:
        yield
    finally:
        _remove()
        values.unparse_flags()
        for module, members in before.items():
            for flag in members:
                flags.DEFINE_flag(flag, module_name=module)
        if parsed:
            values.mark_as_parsed()


def _defined() -> dict[str, list[flags.Flag]]:
    modules = flags.FLAGS.flags_by_module_dict().items()
    return {module: list(members) for module, members in modules if module.startswith("tfdml.") and members}


def _remove() -> None:
    for members in _defined().values():
        for flag in members:
            delattr(flags.FLAGS, flag.name)
