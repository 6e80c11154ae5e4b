"""The compiled kernels. Everything else about the project is in pyproject.toml.

Without a torch to build against, or where compiling fails, the package installs without them and says so on first use.
"""

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    setup()
else:
    from pybind11.setup_helpers import ParallelCompile

    ParallelCompile(default=2).install()
    sources = ["backward", "binding", "exponentials", "gae", "product", "scan"]
    cpu = CppExtension(
        "kernels._cpu",
        [f"csrc/cpu/{name}.cpp" for name in sources],
        depends=["csrc/cpu/kernels.h", "csrc/cpu/product.h", "csrc/cpu/vector.h"],
        # at::parallel_for is a header: without OpenMP here it compiles to one thread, silently. Vectors are passed
        # only between inlined functions, so their ABI does not matter.
        extra_compile_args=["-O3", "-g0", "-fopenmp", "-Wno-psabi"],
        extra_link_args=["-fopenmp"],
        optional=True,
    )
    # Ninja's failures would not count as the compiler's, and so stop the installation.
    setup(ext_modules=[cpu], cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)})
