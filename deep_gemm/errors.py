"""The exceptions of the library. Argument faults are `ValueError` / `TypeError`; a text names the argument, what came, and what was
expected. Faults of the environment (no GPU, driver too old, no symmetric memory) are `BackendUnavailable`."""


class BackendUnavailable(RuntimeError):
    """The asked-for backend cannot run here; the text says what is missing and what to do."""


class CompileError(RuntimeError):
    """A kernel did not compile; the text holds kernel, flags, compiler output and cache path."""


class PeerTimeoutError(TimeoutError):
    """A rank waited longer than the bound for a peer; the text names both ranks and the phase."""
