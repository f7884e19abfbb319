"""Whether a framework's code is the code that a patch was written for: version and source.

``PatchSet.verify`` asks before anything is changed. What is compared gets imported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from packaging.specifiers import SpecifierSet

# Fields that do not change what a node means, or that only newer Pythons write.
_MEANINGLESS_FIELDS = ("kind", "type_comment")
_FINGERPRINT_DIGITS = 16
# Packages that a checkout hides on the import path, with the module that has their version.
_VERSION_MODULES: Final = MappingProxyType({"megatron-core": "megatron.core.package_info"})


@dataclass(frozen=True)
class Guard:
    """Conditions that a patch relies on.

    Args:
        distribution: name in the package index; "" for a checkout, which has no version.
        versions: the versions that were tested, as in requirements: ``>=0.16,<0.17``.
        source_sha256: :func:`fingerprint` of the patched object, or several of them: one for each
            known body. Empty: the source is not compared.
    """

    distribution: str = ""
    versions: str = ""
    source_sha256: str | tuple[str, ...] = ()

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The known bodies, always a tuple."""
        digests = self.source_sha256
        return ((digests,) if digests else ()) if isinstance(digests, str) else digests

    def missing(self) -> str:
        """The requirement of a distribution that is not there, for pip; "" where any version is."""
        if not self.distribution or _version_of(self.distribution) is not None:
            return ""
        return f"{self.distribution}{self.versions}"

    def version_mismatches(self) -> Iterator[str]:
        """The sentence that the distribution has another version, if so."""
        installed = _version_of(self.distribution) if self.distribution else None
        supported = SpecifierSet(self.versions, prereleases=True)
        if installed is not None and not supported.contains(installed):
            yield f"needs {self.distribution} {self.versions}, found {installed}"

    def source_mismatches(self, original: Any) -> Iterator[str]:
        """The sentence that the original's source differs from all known fingerprints, if so.

        Args:
            original: the object of a patch, or a target ``package.module:Class.name``, whose source
                is read from the file: that of a bypass, and of a TorchScript function.
        """
        if not self.fingerprints:
            return
        try:
            digest = (fingerprint_at if isinstance(original, str) else fingerprint)(original)
        except (ImportError, OSError, TypeError) as error:
            yield f"its source cannot be read ({error}), so it cannot be compared"
            return
        if digest not in self.fingerprints:
            expected = " or ".join(self.fingerprints)
            yield f"its source is another: expected fingerprint {expected}, found {digest}"

    def __str__(self) -> str:
        version = f"{self.distribution} {self.versions}".strip()
        return ", ".join(text for text in (version, *self.fingerprints) if text)


NO_GUARD: Final = Guard()


def source_guard(source_sha256: str) -> Guard:
    """A function of a checkout, which has no version."""
    return Guard(source_sha256=source_sha256)


def megatron_core_guard(source_sha256: str | tuple[str, ...]) -> Guard:
    """A function or class of megatron-core, installed or in a checkout of Megatron-LM."""
    return Guard("megatron-core", ">=0.16,<0.17", source_sha256)


def deepspeed_guard(source_sha256: str) -> Guard:
    """A function or class of DeepSpeed."""
    return Guard("deepspeed", ">=0.19,<0.20", source_sha256)


def _version_of(distribution: str) -> str | None:
    """The version of a distribution, that of the imported package where a checkout of it may hide
    an installed one; None: there is none."""
    try:
        if distribution in _VERSION_MODULES:
            module = importlib.import_module(_VERSION_MODULES[distribution])
            return str(module.__version__)
        return importlib.metadata.version(distribution)
    except (ImportError, AttributeError):
        return None


def fingerprint(obj: Any) -> str:
    """Digest of the syntax tree of a function, method or class, without docstrings: comments,
    formatting and the version of Python do not change it. OSError, TypeError without a source."""
    return _digest(ast.parse(textwrap.dedent(inspect.getsource(_underlying_function(obj)))))


def fingerprint_at(target: str) -> str:
    """The :func:`fingerprint` of a definition, read from its module's file.

    Args:
        target: ``package.module:name`` or ``package.module:Class.name``; the module gets imported.

    Raises:
        OSError, TypeError: there is no source to read, or no such name in it.
    """
    name, _, path = target.partition(":")
    node: Any = ast.parse(inspect.getsource(importlib.import_module(name)))
    for attribute in path.split("."):
        node = next((x for x in node.body if getattr(x, "name", None) == attribute), None)
        if node is None:
            raise OSError(f"{name} defines no {path}")
    return _digest(ast.Module([node], []))


def _digest(tree: ast.Module) -> str:
    """SHA-256 of a canonical text of the tree, shortened: tables of patches hold such values."""
    return hashlib.sha256(_canonical(tree).encode()).hexdigest()[:_FINGERPRINT_DIGITS]


def _underlying_function(obj: Any) -> Any:
    """The function of a static or class method or a property; else the object itself."""
    if isinstance(obj, (staticmethod, classmethod)):
        return obj.__func__
    return obj.fget if isinstance(obj, property) else obj


def _canonical(node: Any) -> str:
    """An AST node as text, without docstrings, positions and empty fields, which differ between
    versions of Python: equal text is equal code."""
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={_canonical(value)}"
            for name, value in ast.iter_fields(node)
            if name not in _MEANINGLESS_FIELDS and value not in (None, [])
        ]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_canonical(child) for child in node if not _is_docstring(child))}]"
    return repr(node)


def _is_docstring(node: Any) -> bool:
    """A string as a statement: a docstring, or one that serves as a comment."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
