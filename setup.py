"""Metadata lives in setup.cfg; here is what it cannot say: how the optional kernels are built.

They are plain C behind ctypes, with no Python in them: one build serves every Python, so the file has no version in
its name and the wheel is tagged for the platform alone. Without a compiler the package is built without them.
"""

from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = "serving/engine/native"


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "mlflow_llm.serving.engine.native._native",
            sources=[f"{SOURCES}/native.cpp"],
            depends=sorted(glob(f"{SOURCES}/*.h")),
            # No -march: the kernels choose their instructions themselves and are entered only where these exist.
            extra_compile_args=["-std=c++17", "-O3", "-pthread", "-g0", "-fvisibility=hidden"],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
