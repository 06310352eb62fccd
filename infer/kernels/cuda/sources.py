"""The CUDA sources beside this file, and how they are compiled: NVRTC, no toolkit needed.

Compiled code is kept in $XDG_CACHE_HOME (or ~/.cache) /streamd/cuda-<hash>, where the hash covers
all sources, the options and NVRTC's version.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.user_files import cache_dir, replacing

FOLDER = Path(__file__).parent
LOWEST_ARCHITECTURE = 75

# Products and sums are fused where the sources say fmaf, nowhere else: the bits of a result must
# not depend on what the compiler makes of an instance.
_OPTIONS = ("--std=c++17", "--fmad=false", "--extra-device-vectorization", "-default-device")


def compile_source(name: str, defines: dict[str, object], architecture: int) -> bytes:
    """Machine code of FOLDER/name for sm_<architecture>, from the cache or compiled.

    ConfigError where NVRTC is missing or does not know the architecture; AssertionError with the
    compiler's words where it refuses the source.
    """
    options = [f"--gpu-architecture=sm_{architecture}", *_OPTIONS]
    options += [f"-D{key}={value}" for key, value in sorted(defines.items())]
    cached = _cache_file(name, options)
    try:
        return cached.read_bytes()
    except OSError:
        code = _compile(name, options)
    _keep(cached, code)
    return code


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415 - absent on machines without CUDA

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"CUDA's run-time compiler cannot be loaded ({error})",
            "install torch for CUDA, or the packages cuda-bindings and nvidia-cuda-nvrtc",
        ) from error
    return nvrtc


def _compile(name: str, options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    headers = {path.name: path.read_bytes() for path in sorted(FOLDER.glob("*.cuh"))}
    source = (FOLDER / name).read_bytes()
    program = _check(
        nvrtc.nvrtcCreateProgram(
            source, name.encode(), len(headers), list(headers.values()), _encoded(headers)
        )
    )
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), _encoded(options))[0]
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            raise ConfigError(
                f"CUDA's run-time compiler does not take {' '.join(options)}",
                "use a GPU of compute capability 7.5 or more, and a current NVRTC",
            )
        log = _room(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        assert int(status) == 0, f"{name} {options}: {log.decode(errors='replace')}"
        size_bytes = _check(nvrtc.nvrtcGetCUBINSize(program))
        code = _room(size_bytes)
        _check(nvrtc.nvrtcGetCUBIN(program, code))
        return code[:size_bytes]
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _room(size_bytes: int) -> bytes:
    """Bytes for NVRTC to write into, two more than it needs: the interpreter has one object for
    each string of one byte, and an empty log's zero must not end up in everybody's `b" "`."""
    return bytes(size_bytes + 2)


def _encoded(texts: object) -> list[bytes]:
    return [text.encode() for text in texts]


def _check(answer: tuple[Any, ...]) -> Any:
    assert int(answer[0]) == 0, f"NVRTC says {answer[0]}"
    return answer[1] if len(answer) > 1 else None


@cache
def _sources_hash() -> str:
    digest = hashlib.sha256(repr(_nvrtc().nvrtcVersion()).encode())
    for path in sorted(FOLDER.glob("*.cu*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_file(name: str, options: list[str]) -> Path:
    digest = hashlib.sha256(repr((name, options)).encode()).hexdigest()[:16]
    return cache_dir() / f"cuda-{_sources_hash()}" / f"{Path(name).stem}-{digest}.cubin"


def _keep(path: Path, code: bytes) -> None:
    """Whole or not at all; a cache that cannot be written is done without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(code)
    except OSError:
        return
