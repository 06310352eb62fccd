"""What a chat keeps of itself between runs: its messages beside the KV cache of its tokens."""

from collections.abc import Callable
from typing import Any

import xxhash
from torch import Tensor

from infer.caches.kv_file import Identity, describe_planes
from infer.caches.kv_sessions import KvSessions, sessions_dir
from infer.config import ChatConfig
from infer.session import Session
from infer.text.template import ChatTemplate
from shared.errors import ConfigError, RequestError


def open_sessions(
    session: Session,
    config: ChatConfig,
    template: ChatTemplate,
    planes: dict[str, Tensor],
    tell: Callable[[str], None],
) -> KvSessions | None:
    """The sessions of this model and arithmetic; None, with a word, where none can be kept."""
    engine = session.engine
    identity = Identity(
        # Without the device's number, which may be another after a restart of the machine.
        model=[[f.size_bytes, f.inode, f.mtime_ns] for f in session.index.fingerprints],
        planes=describe_planes(planes),
        arithmetic=[engine.device.type, engine.exact],
        template=xxhash.xxh3_64_hexdigest(template.source.encode()),
    )
    try:
        return KvSessions(sessions_dir(), identity, config.kv_sessions, tell)
    except ConfigError as error:
        tell(f"no sessions are kept: {error}")
        return None


def pack_talk(
    system: str | None, effort: str | None, messages: list[dict[str, str]]
) -> dict[str, Any]:
    return {"system": system, "effort": effort, "messages": messages}


def unpack_talk(talk: dict[str, Any]) -> tuple[str | None, str | None, list[dict[str, str]]]:
    """System message, effort and messages. RequestError for what `pack_talk` has not made."""
    match talk:
        case {
            "system": str() | None as system,
            "effort": str() | None as effort,
            "messages": list(messages),
        } if all(_is_message(message) for message in messages):
            return system, effort, messages
    raise RequestError("the session is not one of a chat", "delete it")


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and {"role", "content"} <= message.keys()
        and all(isinstance(text, str) for pair in message.items() for text in pair)
    )
