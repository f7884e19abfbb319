"""Packaging of ds-usp: pip install ".[deepspeed,megatron]"; extras: README.md, "Install"."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
# Builds need neither torch nor ds_usp itself, nor git.
VERSION = runpy.run_path(str(ROOT / "ds_usp" / "_version.py"))

# Upper bounds stand where ds_usp patches or reads what is inside of a package, at the first version
# that may change it (CONTRIBUTING, "Versions and releases"); in extras only, so that nobody is kept
# from another version: `ds-usp env` names what is out of bounds, the code checks what it patches.
# einops: megatron-core's context parallel groups import it undeclared.
MEGATRON = ["megatron-core>=0.16,<0.17", "einops"]
# DeepSpeed 0.19.7 rounds gradients that are summed in fp32 to bf16 under ZeRO-2, and applies those
# that are not finite under ZeRO-1.
DEEPSPEED = ["deepspeed>=0.19.8,<0.20"]
PLOTS = ["matplotlib"]
TRANSFORMERS = [
    "transformers>=5.5,<6",
    "accelerate>=1.12,<2",
    "trl>=1.10,<2",
    "peft>=0.18",
    "datasets>=4",
]
# diffusers 0.42 needs Python 3.11.
DIFFUSERS = [
    'diffusers>=0.42,<1; python_version >= "3.11"',
    "accelerate>=1.12,<2",
    "peft>=0.18",
]
# The site; what they bring along needs Python 3.11.5.
DOCS = [
    f'{name}; python_full_version >= "3.11.5"'
    for name in ("mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings-python>=2,<3")
]


def write_commit(folder: str) -> list[str]:
    """Write into a built ``folder`` what commit it is of; returns the files, [] if unknown."""
    sha = VERSION["commit"]()
    if sha is None:
        return []
    path = Path(folder, "ds_usp", VERSION["COMMIT_FILE"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an sdist links to its sources: never write through a link
    path.write_text(f"{sha}\n", encoding="ascii")
    return [str(path)]


class BuildPy(build_py):
    """Builds that say their commit; an editable install reads it from the checkout."""

    def run(self):
        super().run()
        self.commit_files = [] if self.editable_mode else write_commit(self.build_lib)

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), *getattr(self, "commit_files", [])]


class Sdist(sdist):
    """Source distributions that say their commit."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


def readme() -> str:
    """Return the long description, or nothing where the README is absent (a bare checkout)."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="ds-usp",
    version=VERSION["__version__"],
    description=(
        "Sequences that one GPU cannot hold: Ulysses x Ring Attention (USP) for torch, "
        "transformers, diffusers, DeepSpeed and Megatron"
    ),
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The ds_usp contributors",
    keywords=[
        "sequence parallelism",
        "context parallelism",
        "ring attention",
        "ulysses",
        "long context",
        "deepspeed",
        "megatron",
        "pytorch",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["ds_usp*", "megatron_patches*"]),
    package_data={
        "ds_usp": ["py.typed", VERSION["COMMIT_FILE"], "planner/*.json"],
        "megatron_patches": ["py.typed"],
    },
    zip_safe=False,
    install_requires=["torch>=2.9", "packaging"],
    extras_require={
        "flash": ["flash-attn>=2.6"],
        # Only pre-releases so far; naming one lets pip take it and later ones without --pre.
        "flash4": ["flash-attn-4>=4.0.0b36"],
        # Its fused exchange of heads, for Tuning(copies="flashinfer").
        "flashinfer": ["flashinfer-python>=0.7.4"],
        # Kernels of layers with a state; ds_usp/recurrence/kernels.py was read of fla-core 0.6.
        "recurrence": ["fla-core>=0.6,<0.7", "mamba-ssm>=2.2,<3"],
        "megatron": MEGATRON,
        "deepspeed": DEEPSPEED,
        "plots": PLOTS,
        "transformers": TRANSFORMERS,
        "diffusers": DIFFUSERS,
        "trainer": [*DEEPSPEED, *PLOTS, "tqdm"],
        "docs": DOCS,
        "test": ["hypothesis", "pytest>=8", "pytest-xdist>=3.8", "ruff", "mypy", "import-linter"],
    },
    entry_points={
        "console_scripts": ["ds-usp = ds_usp.__main__:main"],
        "verl.plugins": ["ds_usp = ds_usp.compat.verl"],  # loaded by verl, which calls nothing
    },
    cmdclass={"build_py": BuildPy, "sdist": Sdist},
)
