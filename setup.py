"""Packaging of ds-usp: pip install -e ".[deepspeed,megatron,plots,test]" -c constraints.txt"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """Read the version from the source, so that building needs neither torch nor ds_usp itself."""
    source = (ROOT / "ds_usp" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('ds_usp/_version.py has no line of the form __version__ = "1.2.3"')
    return match.group(1)


def readme() -> str:
    """Return the long description, or nothing where the README is absent (a bare checkout)."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="ds-usp",
    version=version(),
    description="Unified Sequence Parallelism (Ulysses x Ring) for DeepSpeed and Megatron",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["ds_usp*", "megatron_patches*"]),
    package_data={"ds_usp": ["py.typed"]},
    install_requires=["torch>=2.6", "packaging"],
    extras_require={
        "flash": ["flash-attn>=2.6"],
        # einops: megatron-core's hierarchical context parallel groups import it undeclared.
        "megatron": ["megatron-core>=0.16", "einops"],
        "deepspeed": ["deepspeed>=0.19"],
        "plots": ["matplotlib"],
        "test": ["pytest>=8", "pytest-xdist>=3.8", "hypothesis", "ruff", "mypy"],
    },
)
