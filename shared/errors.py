"""Every exception this project raises for the world's faults, in one tree.

Each carries what went wrong (`message`) and what to do about it (`remedy`); `code` names its kind
on the wire, so that a daemon's refusal is raised again in the client as the same class.
Our own bugs are `assert`s, never one of these.
"""


class StreamError(Exception):
    """Root of the tree. `str(error)` is the message, then the remedy where there is one."""

    code = "error"

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class ConfigError(StreamError):
    """An option, a configuration file or an environment that cannot be used."""

    code = "config"


class PlanError(ConfigError):
    """A memory budget that cannot hold what the model needs."""

    code = "plan"


class ModelError(StreamError):
    """The model file cannot be used."""

    code = "model"


class MalformedModel(ModelError):
    """Not a GGUF file, or one that contradicts itself: truncated, absurd counts, wrong shapes."""

    code = "malformed-model"


class UnsupportedModel(ModelError):
    """A sound file that needs something we do not have: architecture, tensor type, tokenizer."""

    code = "unsupported-model"


class ModelChanged(ModelError):
    """The file is no longer the one that was opened."""

    code = "model-changed"


class ReadFailed(StreamError):
    """The disk did not deliver."""

    code = "read-failed"


class GpuError(StreamError):
    """CUDA is not there, cannot do what is needed, or says no."""

    code = "gpu"


class NoGpuTier(GpuError):
    """The daemon keeps nothing in GPU memory."""

    code = "no-gpu-tier"


class GpuNotShared(NoGpuTier):
    """It would, but this machine's GPU memory cannot be shared between processes."""

    code = "gpu-not-shared"


class DaemonError(StreamError):
    """The daemon cannot be reached, or says no."""

    code = "daemon"


class DaemonNotRunning(DaemonError):
    code = "not-running"


class DaemonLost(DaemonError):
    """It was there and has gone, or does not answer within its deadline."""

    code = "daemon-lost"


class DaemonBusy(DaemonError):
    """No room for one more client, or the name is taken."""

    code = "daemon-busy"


class ProtocolMismatch(DaemonError):
    code = "protocol"


class ClientRevoked(DaemonError):
    """The daemon stopped waiting for this client; it has to attach again."""

    code = "revoked"


class RequestError(StreamError):
    """What the user asked for does not fit the model: prompt too long, token out of range."""

    code = "request"


def cause_of(error: Exception) -> str:
    """In words; of an OSError without its number and its path, which the message has already."""
    return getattr(error, "strerror", None) or str(error)


def _tree(root: type[StreamError]) -> dict[str, type[StreamError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE = _tree(StreamError)


def from_wire(code: str, message: str, remedy: str) -> StreamError:
    """The exception a peer sent; an unknown code becomes the root class."""
    return BY_CODE.get(code, StreamError)(message, remedy)
