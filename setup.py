"""Metadata lives in setup.cfg; here is what it cannot say: how the optional kernels are built.

They are plain C behind ctypes, with no Python in them: one build serves every Python, so the file has no version in
its name and the wheel is tagged for the platform alone. Without a compiler the package is built without them.
"""

import atexit
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

SOURCES = "serving/engine/native"


class BuildOutside(build):
    """A build outside the checkout: its ``build/`` would carry over modules that are no longer there."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="mlflow-llm-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        super().egg2dist(egginfo_path, distinfo_path)
        place = os.path.join(distinfo_path, "sboms")  # PEP 770
        os.makedirs(place, exist_ok=True)
        with open(os.path.join(place, "mlflow-llm.cdx.json"), "w", encoding="utf-8") as file:
            json.dump(bill_of_materials(self.distribution), file, indent=1, sort_keys=True)


def bill_of_materials(distribution: object) -> dict[str, object]:
    """CycloneDX 1.6: the project, the sources of its kernels with their hashes, and what it needs, by version range.

    Nothing is vendored: which version of a dependency is there, the environment says.
    """
    metadata = distribution.metadata  # type: ignore[attr-defined]
    root = f"pkg:pypi/{metadata.name}@{metadata.version}"
    required = [(line, "required") for line in distribution.install_requires]  # type: ignore[attr-defined]
    for extra, lines in sorted(distribution.extras_require.items()):  # type: ignore[attr-defined]
        required += [(line, "optional") for line in lines] if extra not in ("docs", "test") else []
    components: dict[str, dict[str, object]] = {}
    for line, scope in required:
        name, bounds = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*([^;]*).*", line).groups()  # type: ignore[union-attr]
        purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}"
        properties = [{"name": "mlflow-llm:requires", "value": bounds.strip() or "any"}]
        components.setdefault(
            purl,
            {"type": "library", "bom-ref": purl, "name": name, "purl": purl, "scope": scope, "properties": properties},
        )
    sources = kernel_sources()
    files = [{"type": "file", "bom-ref": file, "name": file, "hashes": [sha256(file)]} for file in sources]
    license_ = {"license": {"id": "Apache-2.0"}}
    project = {"type": "library", "bom-ref": root, "name": metadata.name, "version": metadata.version, "purl": root}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**project, "licenses": [license_]}},
        "components": [*components.values(), *files],
        "dependencies": [{"ref": root, "dependsOn": [*components, *sources]}],
    }


def kernel_sources() -> list[str]:
    found = [*glob(f"{SOURCES}/*.cpp"), *glob(f"{SOURCES}/**/*.h", recursive=True)]
    return sorted(path.replace(os.sep, "/") for path in found)


def sources_digest() -> str:
    """Return the digest that ``native/library.py`` compares in a checkout, to find kernels older than their sources."""
    digest = hashlib.sha256()
    for path in kernel_sources():
        with open(path, "rb") as file:
            digest.update(hashlib.sha256(file.read()).digest())
    return digest.hexdigest()


def sha256(path: str) -> dict[str, str]:
    with open(path, "rb") as file:
        return {"alg": "SHA-256", "content": hashlib.sha256(file.read()).hexdigest()}


def kernels(name: str, source: str, *flags: str) -> Extension:
    return Extension(
        f"mlflow_llm.serving.engine.native.{name}",
        sources=[f"{SOURCES}/{source}"],
        depends=kernel_sources(),
        include_dirs=[SOURCES],
        define_macros=[("MLFLOW_LLM_SOURCES", f'"{sources_digest()}"')],
        # No -march: the kernels choose their instructions themselves and are entered only where these exist.
        extra_compile_args=["-std=c++17", "-O3", "-pthread", "-g0", "-fvisibility=hidden", *flags],
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )


# A row's sums are the same whatever is beside it: so must be where the compiler joins a product and a sum.
IN_ORDER = "-ffp-contract=off"
X86, ARM = platform.machine() in ("x86_64", "AMD64"), platform.machine() in ("aarch64", "arm64")
FIXED_LENGTH = "-msve-vector-bits=256"  # g++ since 10; it is not built where the compiler knows less

setup(
    ext_modules=[
        kernels("_native", "native.cpp", *([] if X86 else [IN_ORDER])),
        *([kernels("_native_avx2", "native_avx2.cpp", IN_ORDER)] if X86 else []),
        *([kernels("_native_sve", "native_sve.cpp", IN_ORDER, FIXED_LENGTH)] if ARM else []),
    ],
    cmdclass={"build": BuildOutside, "build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
