"""Checkouts of training frameworks: which one a path is in, and how it becomes importable.

Each process does so before it imports ``megatron``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ds_usp.errors import ConfigError


@dataclass(frozen=True)
class Checkout:
    """A framework that is used from a clone of its repository.

    Args:
        name: of the project, for messages.
        markers: files that its root has, and no other folder.
        repository: the address to clone.
        variable: the environment variable with its path.
    """

    name: str
    markers: tuple[str, ...]
    repository: str
    variable: str

    def root_of(self, path: Path) -> Path | None:
        """The innermost root that holds ``path``, a file or a folder; None: it is in none."""
        path = path.expanduser().resolve()
        folders = (path, *path.parents)
        return next((folder for folder in folders if self._is_root(folder)), None)

    def find(self, path: Path | None) -> Path:
        """:meth:`root_of` the user's path; ConfigError for none (None), one that does not exist, or
        that is in no checkout."""
        if path is None:
            raise ConfigError(
                f"give the path of a checkout of {self.name}, or set {self.variable}: git clone "
                f"{self.repository}"
            )
        if not path.expanduser().exists():
            raise ConfigError(f"{path} does not exist; give a checkout of {self.name}")
        root = self.root_of(path)
        if root is None:
            raise ConfigError(
                f"{path} is in no checkout of {self.wanted}. Get one: git clone {self.repository}"
            )
        return root

    @property
    def wanted(self) -> str:
        """Its name and the files that were looked for, for messages."""
        return f"{self.name} (no {', '.join(self.markers)} there or above it)"

    def prepend_to_path(self, root: Path) -> None:
        """Let ``import megatron`` find this checkout before an installed megatron-core; ConfigError
        if another ``megatron`` or ``megatron.core`` is loaded already."""
        for name in ("megatron", "megatron.core"):
            loaded = getattr(sys.modules.get(name), "__path__", ())
            package = root.joinpath(*name.split("."))
            # The path of a namespace package (megatron-core's megatron) follows sys.path.
            follows = not isinstance(loaded, list) and not (package / "__init__.py").exists()
            if loaded and not follows and str(package) != next(iter(loaded)):
                raise ConfigError(
                    f"{name} is loaded already, from {', '.join(loaded)}, and not from {root}. "
                    f"Start {self.name} in a process of its own: python -m megatron_patches.run"
                )
        if sys.path[:1] != [str(root)]:  # behind site-packages it would come second
            sys.path.insert(0, str(root))

    def _is_root(self, folder: Path) -> bool:
        return all((folder / marker).is_file() for marker in self.markers)
