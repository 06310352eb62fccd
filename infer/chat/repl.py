"""`infer chat`: a conversation at the terminal, from a pipe, or one answer to one prompt."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from infer.caches.kv_sessions import KvSessions
from infer.chat.chat_sessions import open_sessions, pack_talk, unpack_talk
from infer.chat.progress import PrefillProgress
from infer.config import ChatConfig
from infer.generation.draft import choose_decoding
from infer.generation.generate import Answer, Conversation, recall_nothing
from infer.generation.sampler import Sampler, SamplerConfig
from infer.session import Session
from infer.text.template import ChatTemplate
from shared.errors import ReadFailed, RequestError
from shared.stats_view import render_stats
from shared.user_files import state_dir

HELP = """\
/help             this
/stats            what the daemon has done
/reset            begin a new conversation
/save NAME        keep this one, with what has been computed for it
/load [NAME]      go on with one that was saved; without a name with the latest of them
/system [TEXT]    set the system message (nothing: remove it) and start anew
/think [EFFORT]   reasoning effort: {choices}
/exit             leave (Ctrl-D too); Ctrl-C ends an answer"""


def chat(session: Session, config: ChatConfig, prompt: str | None) -> int:
    """Answer `prompt` and return, else talk until the input ends."""
    talk = Chat(session, config)
    try:
        if prompt is not None:
            talk.say(prompt)
            return 0
        return _converse(talk)
    finally:
        talk.keep()


def _converse(talk: "Chat") -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{talk.describe()}\nType a message, or /help.", file=sys.stderr)
    read_line = _terminal_reader() if interactive else _read_piped_line
    failed = False
    while True:
        try:
            with talk.idle():
                text = read_line().strip()
            if text.split()[:1] in (["/exit"], ["/quit"]):
                break
            if text:
                failed |= not talk.take(text)
        except EOFError:
            break
        except KeyboardInterrupt:  # at the prompt, or once more just after an answer was stopped
            if not interactive:
                raise
    return int(failed and not interactive)  # a script must be able to tell


class Chat:
    """The messages so far, and what is done with each line."""

    def __init__(self, session: Session, config: ChatConfig) -> None:
        self._session = session
        self._config = config
        self._template = ChatTemplate.from_metadata(session.index.metadata, session.tokenizer)
        self._decoding = choose_decoding(session.engine, config.draft)
        self._sessions = open_sessions(
            session, config, self._template, self._decoding.planes(), _show
        )
        progress = PrefillProgress(session.engine.shape.n_layers)
        session.engine.watcher = progress.tap
        if session.engine.recovery is not None:
            session.engine.recovery.tell = _interrupt_with
        self._conversation = Conversation(
            session.engine,
            session.tokenizer,
            self._decoding,
            self._sessions.recall if self._sessions else recall_nothing,
            progress.prefill,
        )
        self._sampler = Sampler(
            SamplerConfig(config.temp, config.top_k, config.top_p, config.min_p, config.seed)
        )
        self._system = config.system
        self._effort = self._initial_effort()
        self._messages: list[dict[str, str]] = []

    def describe(self) -> str:
        """In a line: what one talks to."""
        session = self._session
        daemon = f"daemon {session.daemon_name}" if session.daemon_name else "a daemon of its own"
        context = session.engine.kv.context
        return f"{session.index.paths[0].name} · context {context:,} tokens · {daemon}"

    def take(self, text: str) -> bool:
        """One line of a conversation: a command or a message; False after an error, then shown."""
        try:
            if text.startswith("/"):
                self._command(*text[1:].split(maxsplit=1))
            else:
                self.say(text)
        except (RequestError, ReadFailed) as error:
            _show(str(error))
            return False
        except KeyboardInterrupt:
            _show("(stopped)")
        return True

    def say(self, text: str) -> None:
        """Answer a message on stdout. It becomes part of the conversation if an answer began."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._template.render_to_ids([*system, *messages], self._effort)
        answer, said, thought = Answer(), [], []
        lookups_before = self._session.engine.client.lookups
        pieces = self._conversation.answer(prompt, self._sampler, self._config.max_tokens, answer)
        try:
            for piece in pieces:
                (thought if piece.reasoning else said).append(piece.text)
                _write(piece.text, sys.stderr if piece.reasoning else sys.stdout)
        finally:
            pieces.close()
            if said or thought or answer.stopped:
                reply = {"role": "assistant", "content": "".join(said)}
                if thought:
                    reply["reasoning_content"] = "".join(thought)
                self._messages = [*messages, reply]
                _write("\n", sys.stdout)
        self._show_figures(answer, *lookups_before)

    def idle(self) -> AbstractContextManager[None]:
        """While a line is waited for."""
        return self._session.engine.idle()

    def keep(self) -> None:
        """Leave the conversation on disk, for the next that begins like it."""
        if self._sessions:
            talk = pack_talk(self._system, self._effort, self._messages)
            self._sessions.keep(self._conversation.held, talk, self._conversation.planes)

    def _initial_effort(self) -> str | None:
        config = self._config
        if config.effort is not None or config.think is None:
            return config.effort
        wanted = "high" if config.think else "no_think"
        if wanted not in self._template.reasoning_choices:
            flag = "--think" if config.think else "--no-think"
            raise RequestError(
                f"this model's chat template has no switch for {flag}", f"leave {flag} out"
            )
        return wanted

    def _command(self, name: str = "", rest: str = "") -> None:
        match name:
            case "help":
                choices = ", ".join(self._template.reasoning_choices) or "this model has no choice"
                print(HELP.format(choices=choices), file=sys.stderr)
            case "stats":
                engine = self._session.engine
                stats = engine.redo_if_lost(engine.client.stats)
                print(render_stats(stats), file=sys.stderr)
                if (prefetch := engine.prefetch) is not None and (ahead := prefetch.describe()):
                    print(f"ahead     {ahead}", file=sys.stderr)
            case "reset":
                self._reset()
                _show("a new conversation")
            case "save":
                self._save(rest)
            case "load":
                self._load(rest)
            case "system":
                self._reset()
                self._system = rest or None
                told = "system message set" if rest else "no system message"
                _show(f"{told}, a new conversation")
            case "think":
                if rest not in self._template.reasoning_choices:
                    choices = ", ".join(self._template.reasoning_choices) or "no choice of effort"
                    raise RequestError(
                        f"no reasoning effort {rest!r}", f"this model knows {choices}"
                    )
                self._effort = rest
            case _:
                raise RequestError(f"there is no command /{name}", "see /help")

    def _reset(self) -> None:
        self.keep()
        self._messages = []
        self._conversation.reset()

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save has to know as what", "give a name: /save NAME")
        talk = pack_talk(self._system, self._effort, self._messages)
        sessions, conversation = self._known_sessions(), self._conversation
        replaces = name in sessions.names
        path = sessions.save(name, conversation.held, talk, conversation.planes)
        _show(f"{'saved, replacing the one of that name' if replaces else 'saved'}: {path}")

    def _load(self, name: str) -> None:
        sessions = self._known_sessions()
        with sessions.find(name, self._session.engine.kv.context) as file:
            ids, label = file.head.ids, sessions.label(file)
            system, effort, messages = unpack_talk(file.head.talk)
            self._reset()
            file.restore(self._conversation.planes, len(ids))
        self._conversation.resume(ids)
        self._system, self._effort, self._messages = system, effort, messages
        last = messages[-1]["content"] if messages else ""
        _show(f"{label}: {len(messages)} messages, {len(ids)} tokens; the last message: {last}")

    def _known_sessions(self) -> KvSessions:
        if self._sessions is None:
            raise RequestError("no sessions are kept", "the reason was shown at the start")
        return self._sessions

    def _show_figures(self, answer: Answer, hits_before: int, misses_before: int) -> None:
        hits, misses = self._session.engine.client.lookups
        hits, misses = hits - hits_before, misses - misses_before
        parts = [
            f"{answer.prompt_count} prompt tokens, {answer.prefilled_count} new",
            f"{answer.token_count} tokens, {answer.decode_tps:.1f} t/s",
            f"{100 * hits / max(hits + misses, 1):.1f}% hits",
        ]
        if guessed_count := self._decoding.guessed_count:
            parts.append(f"{self._decoding.accepted_count} of {guessed_count} guesses stood")
        if not answer.stopped:
            full = self._session.engine.kv.length >= self._session.engine.kv.context
            parts.append("the context is full: /reset" if full else "cut at --max-tokens")
        _show(" · ".join(parts))


def _write(text: str, stream: TextIO) -> None:
    stream.write(text)
    stream.flush()


def _show(text: str) -> None:
    """A line beside the conversation; dim on a terminal."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr)


def _interrupt_with(text: str) -> None:
    """A line of its own, between the words of an answer perhaps."""
    _show(f"\n({text})")


def _read_piped_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _terminal_reader() -> Callable[[], str]:
    """Reads a line typed at the prompt, with a history kept in a file; EOFError for Ctrl-D."""
    prompt: PromptSession[str] = PromptSession(history=_history())
    return lambda: prompt.prompt("> ")


def _history() -> History:
    state = state_dir()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = state / "chat-history"
        path.touch(mode=0o600)
    except OSError as error:
        _show(f"no history is kept: {error}")
        return InMemoryHistory()
    return FileHistory(str(path))
