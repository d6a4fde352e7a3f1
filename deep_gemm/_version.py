"""The version, stated here only: the build, `deep_gemm.__version__` and the results files read it."""

__version__ = "3.0.0"
