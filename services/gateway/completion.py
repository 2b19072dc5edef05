"""From a request to growing text: the part that both APIs share."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

from opentelemetry.trace import Tracer

from spool.protos import worker_pb2
from spool.protos.scheduler_pb2 import ServedModel
from spool.scheduler.sampling import Grammar, SamplingParameters
from spool.services.backend.interface import BackendUnavailableError, DeadlineExceededError, GenerationRequest
from spool.services.gateway.answers.planning import answer_form, answer_structure
from spool.services.gateway.answers.reader import AnswerForm
from spool.services.gateway.api_keys import cache_scope
from spool.services.gateway.choice import Choice, Piece, joined
from spool.services.gateway.errors import ErrorKind, RequestError, invalid
from spool.services.gateway.metrics import GatewayMetrics
from spool.services.gateway.options import (
    ChatPrompt,
    GenerationOptions,
    Prompt,
    TextPrompt,
    check_length,
    check_options,
    check_token_ids,
    sampling_parameters,
    with_seed_of,
)
from spool.services.gateway.prompts import PreparedPrompt, bad_word_tokens, encode_alone, prepare_prompts
from spool.services.gateway.settings import GatewaySettings
from spool.services.gateway.structure import GrammarChecks, Structure
from spool.services.gateway.token_strings import TokenStrings
from spool.services.gateway.turns import KeyedThreads
from spool.services.observability.request_ids import (
    current_account,
    current_request_id,
    current_traceparent,
    note_trace,
    request_began,
)
from spool.services.observability.tracing import begin_request_span, end_span, traceparent_of
from spool.services.receipts.fingerprint import differences, fingerprint_name
from spool.services.receipts.receipt import Receipt
from spool.services.receipts.signing import ReceiptKey
from spool.services.scheduler_client.remote import SchedulerClient, workers_in_use
from spool.services.text.incremental_decoder import IncrementalDecoder
from spool.services.text.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

_SECONDS = ("seconds", "queue_seconds", "prefill_seconds", "decode_seconds")

# OpenAI's: of a text continuation that names no max_tokens.
_CONTINUATION_TOKENS = 16
# Between two tokens of a stream, the event loop may wait for each to give the interpreter's lock away.
_THREADS = 2
# Everybody may ask whether a target is up, as often as they like, and asking the schedulers costs them work.
_READINESS_HOLDS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Usage:
    """Each prompt counts once, however many choices continue it. `cached_tokens` of the prompts' tokens had their KV on
    the target already. `seed` is that of choice 0, as the client gave it if it did."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted: int
    accepted: int
    seed: int


class Completion:
    """A request under way: `n` choices of each of `prompts`, the choices of the first prompt first. Receipts are signed
    with `receipt_key`, if there is one. `ended` is told attributes for traces, and why the request failed, if it did.

    Leaving the `with` block, or calling `cancel`, frees all unfinished sequences.
    """

    def __init__(
        self,
        model: str,
        info: ServedModel,
        prompts: Sequence[PreparedPrompt],
        n: int,
        seed: int,
        form: AnswerForm,
        ended: Callable[[dict[str, Any], str | None], None],
        receipt_key: ReceiptKey | None,
    ) -> None:
        self.request_id = uuid.uuid4().hex
        self.created = int(time.time())
        self.model = model
        self._info = info
        self._receipt_key = receipt_key
        self.seed = seed
        self.form = form
        self.choices: list[Choice] = []
        self.prompts = prompts
        self.n = n
        self._ended = ended
        self._failure: str | None = None

    def cancel(self) -> None:
        for choice in self.choices:
            choice.cancel()

    def prompt_of(self, choice: int) -> PreparedPrompt:
        return self.prompts[choice // self.n]

    def receipt(self, index: int) -> dict[str, Any] | None:
        """Of a choice that has ended; None where none was asked for."""
        choice = self.choices[index]
        if not choice.request.logits_digests:
            return None
        fingerprint, *others = choice.fingerprints.values()
        if others:
            unlike = "; ".join(differences(fingerprint, others[0]))
            return {"refused": f"targets that are not alike computed the output: {unlike}"}
        output, digests = zip(*choice.digested, strict=True)
        request = choice.request
        receipt = Receipt(self.model, fingerprint, request.prompt, output, digests, request.sampling)
        return receipt.to_json(self._receipt_key)

    @property
    def fingerprint(self) -> str:
        """The name of that of the targets up to now; several names with + between them where they are not alike."""
        names = {name for choice in self.choices for name in choice.fingerprints}
        return "+".join(sorted(names)) or fingerprint_name(self._info.fingerprint)

    def usage(self) -> Usage:
        """Up to now."""
        return Usage(
            prompt_tokens=sum(len(prompt.tokens) for prompt in self.prompts),
            cached_tokens=sum(choice.cached for choice in self.choices[:: self.n]),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
            drafted=sum(choice.drafted for choice in self.choices),
            accepted=sum(choice.accepted for choice in self.choices),
            seed=self.seed,
        )

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices, as they come. A choice that fails cancels the others, and its error is raised."""
        try:
            if len(self.choices) == 1:
                async with aclosing(self.choices[0].pieces()) as pieces:
                    async for piece in pieces:
                        yield piece
            else:
                async with aclosing(_merged(self.choices)) as pieces:
                    async for piece in pieces:
                        yield piece
        except Exception as error:
            self._failure = str(error)
            raise
        finally:
            self.cancel()

    async def whole(self) -> list[Piece]:
        """Each choice as one piece, once all have ended."""
        pieces: list[list[Piece]] = [[] for _ in self.choices]
        async for piece in self.pieces():
            pieces[piece.index].append(piece)
        return [joined(each) for each in pieces]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        counts = asdict(self.usage())
        # Of several choices, those of the slowest.
        phases = zip(*(choice.phases() for choice in self.choices), strict=True)
        seconds = [time.perf_counter() - request_began(), *map(max, phases)]
        figures = {
            "completion": self.request_id,
            "finish_reasons": [choice.finish_reason for choice in self.choices],
            **{name: round(each, 6) for name, each in zip(_SECONDS, seconds, strict=False)},
            "workers": ",".join(sorted({worker for choice in self.choices for worker in choice.workers})),
        }
        logger.info("completion ended", extra={"figures": figures | counts})
        ends = ",".join(choice.finish_reason or "abort" for choice in self.choices)
        # Seeds can exceed the integers of traces.
        attributes = {f"spool.{name}": count for name, count in counts.items() if name != "seed"}
        self._ended({**attributes, "spool.finish_reasons": ends}, self._failure)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a request asks for, as far as the tokenizer and the chat's template tell."""

    prompts: list[PreparedPrompt]
    decoders: list[IncrementalDecoder]
    """One for each choice of each prompt."""
    sampling: SamplingParameters
    form: AnswerForm
    structure: Structure | None


class CompletionEngine:
    """Starts completions on a backend, within the limits of the settings. Serves any number of requests at once."""

    def __init__(
        self,
        backend: SchedulerClient,
        tokenizer: ModelTokenizer,
        settings: GatewaySettings,
        metrics: GatewayMetrics | None = None,
        tracing: Tracer | None = None,
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.strings = TokenStrings(tokenizer)
        self.settings = settings
        self.metrics = metrics or GatewayMetrics()
        self._tracing = tracing
        self.threads = KeyedThreads(_THREADS)
        """For reading and preparing requests."""
        self._grammars = GrammarChecks(tokenizer.folder)
        key = settings.receipt_key
        self.receipt_key = None if key is None else ReceiptKey(key.get_secret_value())
        self._readiness: asyncio.Task[None] | None = None
        self._readiness_ends = 0.0
        self.open_requests = 0
        """Requests over both APIs that `start` was called for and whose completion has not ended."""
        self.leaving = False
        """Set when clients should be sent to other gateways."""

    async def model(self, name: str | None) -> tuple[str, ServedModel]:
        """The model's name and description; `name` is one of its names, or None.

        Raises RequestError or BackendUnavailableError.
        """
        info = await self.backend.model()
        if info.tokenizer_digest not in (b"", self.tokenizer.vocabulary_digest):
            raise RequestError(
                ErrorKind.FAILED, "the gateway's tokenizer does not match the served model", code="wrong_tokenizer"
            )
        names = self.settings.model_names or (info.model_id,)
        if name and name not in names:
            shown = name[:200].encode("utf-8", "backslashreplace").decode()
            message = f"the model {shown!r} does not exist, this server has {', '.join(names)}"
            raise RequestError(ErrorKind.NOT_FOUND, message, param="model", code="model_not_found")
        return name or names[0], info

    async def check_ready(self) -> None:
        """Raises BackendUnavailableError unless a target worker is up, or was up to half a second ago."""
        known = self._readiness
        if known is None or (known.done() and time.monotonic() >= self._readiness_ends):
            known = self._readiness = asyncio.create_task(self._find_ready())
        await asyncio.shield(known)

    async def _find_ready(self) -> None:
        try:
            await self._ask_ready()
        finally:
            self._readiness_ends = time.monotonic() + _READINESS_HOLDS_SECONDS

    async def _ask_ready(self) -> None:
        workers = workers_in_use(await self.backend.statuses())
        if not any(worker.role == worker_pb2.ROLE_TARGET for worker in workers):
            raise BackendUnavailableError("no target worker is up")

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool, info: ServedModel) -> list[int]:
        """`add_special_tokens` is for texts; a chat's template writes its special tokens itself.

        Raises RequestError, also for more tokens than the model takes, or ChatTemplateError.
        """
        limit = info.max_sequence_length
        return await self.threads.run(encode_alone, prompt, self.tokenizer, self.settings, limit, add_special_tokens)

    async def detokenize(self, name: str, tokens: Sequence[int], info: ServedModel) -> str:
        """`name` is the field that holds the tokens, for error messages. Raises RequestError."""

        def decode() -> str:
            check_length(name, tokens, info.max_sequence_length)
            check_token_ids(name, tokens, info.vocabulary_size)
            return self.tokenizer.decode(tokens, False)

        return await self.threads.run(decode)

    async def start(self, model_name: str | None, prompts: Sequence[Prompt], options: GenerationOptions) -> Completion:
        """Returns once every sequence is admitted. Raises RequestError, or those of the backend."""
        span = begin_request_span(self._tracing, current_traceparent(), current_request_id())
        note_trace(traceparent_of(span))
        self.open_requests += 1

        def ended(attributes: dict[str, Any], failure: str | None) -> None:
            self.open_requests -= 1
            end_span(span, attributes, failure)

        deadline = request_began() + self._timeout(options)
        try:
            async with asyncio.timeout(deadline - time.perf_counter()) as waiting:
                return await self._start(model_name, prompts, options, deadline, traceparent_of(span), ended)
        except BaseException as error:
            late = isinstance(error, TimeoutError) and waiting.expired()
            known = DeadlineExceededError("the request was not admitted before its deadline") if late else error
            ended({}, str(known) or type(known).__name__)
            if known is error:
                raise
            raise known from None

    async def _start(
        self,
        model_name: str | None,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        deadline: float,
        traceparent: str,
        ended: Callable[[dict[str, Any], str | None], None],
    ) -> Completion:
        """`deadline` is a time of `time.perf_counter`."""
        name, info = await self.model(model_name)
        plan = await self.threads.run(self._plan, prompts, options, info)
        prepared, sampling, form, structure = plan.prompts, plan.sampling, plan.form, plan.structure
        if structure is not None:
            sampling = replace(sampling, grammar=await self._grammar(structure, options, info))
        budgets = [self._max_tokens(prompt, one, options, info) for prompt, one in zip(prompts, prepared, strict=True)]
        if options.min_tokens > min(budgets):
            limit = f"at most max_tokens, which is {min(budgets)}"
            raise invalid(f"min_tokens is {options.min_tokens}, must be {limit}", "min_tokens")
        if options.min_tokens:
            ends = self._stop_token_ids(options)
            sampling = replace(sampling, min_tokens=options.min_tokens, end_token_ids=ends)
        seconds_left = deadline - time.perf_counter()
        if seconds_left <= 0:
            raise DeadlineExceededError("the request was not admitted before its deadline")
        common = GenerationRequest(
            prompt=(),
            max_tokens=0,
            deadline_seconds=seconds_left,
            stop_token_ids=self._stop_token_ids(options),
            draft_length=options.draft_length,
            proposer=options.proposer or "",
            top_logprobs=options.top_logprobs,
            request_id=current_request_id(),
            traceparent=traceparent,
            key=current_account(),
            priority=options.priority,
            cache_scope=cache_scope(options.cache_salt, self.settings.share_prefix_cache),
            prompt_logprobs=options.prompt_logprobs,
            logits_digests=_receipts(options, self.settings.receipts, info, min(budgets)),
        )
        seed = sampling.seed if options.seed is None else options.seed
        completion = Completion(name, info, prepared, options.n, seed, form, ended, self.receipt_key)
        try:
            for index, decoder in enumerate(plan.decoders):
                place, number = divmod(index, options.n)
                one, most, seeded = prepared[place], budgets[place], with_seed_of(sampling, number)
                request = replace(common, prompt=one.tokens, max_tokens=most, sampling=seeded)
                meter = self.metrics.sequence(request_began(), len(one.tokens))
                # Log probabilities of the prompt come with a token of output.
                stream = self.backend.submit(replace(request, max_tokens=max(most, 1)))
                about = (options, one.text or "", form.reasoning)
                completion.choices.append(Choice(index, request, stream, decoder, meter, *about))
            # All at once: one after the other, each would wait for the scheduler's answer to the one before.
            for choice in completion.choices:
                await choice.admitted()
        except BaseException:
            completion.cancel()
            raise
        return completion

    def _plan(self, prompts: Sequence[Prompt], options: GenerationOptions, info: ServedModel) -> _Plan:
        """Not for the event loop: takes long for long prompts and large schemas. Raises as `start`."""
        limits = self.settings.limits
        check_options(options, limits, info.vocabulary_size)
        bad_words = bad_word_tokens(options.bad_words, self.tokenizer)
        sampling = sampling_parameters(options, self.settings.sampling, info.vocabulary_size, bad_words)
        if len(prompts) * options.n > limits.sequences:
            message = (
                f"{len(prompts)} prompts with n of {options.n} make {len(prompts) * options.n} sequences, "
                f"must be at most {limits.sequences}"
            )
            raise RequestError(ErrorKind.INVALID, message, param="n")
        prepared = prepare_prompts(prompts, self.tokenizer, info, self.settings, options)
        form = answer_form(options, prepared[0].reasoning, self.tokenizer, self.settings.tool_format)
        decoders = [
            self.tokenizer.decoder(prompt.tokens, options.skip_special_tokens, form.markers, prompt.begun)
            for prompt in prepared
            for _ in range(options.n)
        ]
        return _Plan(prepared, decoders, sampling, form, answer_structure(options, form, self.tokenizer))

    async def _grammar(self, structure: Structure, options: GenerationOptions, info: ServedModel) -> Grammar:
        """Raises RequestError."""
        if options.ignore_eos:
            raise invalid(f"ignore_eos is true, must be false with {structure.param}", "ignore_eos")
        if not info.tokenizer_digest:
            raise invalid(f"{structure.param} needs a model with a tokenizer", structure.param)
        ends = self.tokenizer.stop_token_ids or frozenset(options.stop_token_ids)
        if not ends:
            raise invalid(f"{structure.param} needs stop_token_ids, as the model has no end token", structure.param)
        if options.structure is not None and options.structure.param != structure.param:
            # Calls must come in its place; it is refused all the same if it is wrong.
            await self._grammars.definition(options.structure)
        return Grammar(await self._grammars.definition(structure), ends)

    def _stop_token_ids(self, options: GenerationOptions) -> frozenset[int]:
        asked = frozenset(options.stop_token_ids)
        return asked if options.ignore_eos else asked | self.tokenizer.stop_token_ids

    def _max_tokens(
        self, prompt: Prompt, prepared: PreparedPrompt, options: GenerationOptions, info: ServedModel
    ) -> int:
        """A chat may use all the length that is left; a text continuation is short unless the client asks for more."""
        if options.max_tokens is not None:
            return options.max_tokens
        room = info.max_sequence_length - len(prepared.tokens)
        limit = self.settings.limits.output_tokens or room
        if not isinstance(prompt, ChatPrompt):
            limit = min(limit, max(_CONTINUATION_TOKENS, options.min_tokens))
        return min(limit, room)

    def _timeout(self, options: GenerationOptions) -> float:
        longest = self.settings.limits.timeout_seconds
        asked = options.timeout_seconds or self.settings.default_timeout_seconds
        return longest if asked is None else min(asked, longest)


def _receipts(options: GenerationOptions, default: bool, info: ServedModel, max_tokens: int) -> bool:
    """Whether choices get receipts. Raises RequestError where a request asks for what cannot be."""
    reason = None
    if info.fingerprint.get("exact") != "on":
        reason = (
            "must be false: the targets do not run in exact mode (models.exact), so nothing could be computed again"
        )
    elif max_tokens == 0:
        reason = "must be false where max_tokens is 0"
    if options.receipt and reason is not None:
        raise invalid(f"receipt is true, {reason}", "receipt")
    return default and reason is None if options.receipt is None else options.receipt


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[Piece, None]:
    arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def read(choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                arrived.put_nowait(piece)
        except Exception as error:  # raised by the consumer below  # noqa: BLE001
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    readers = [asyncio.create_task(read(choice)) for choice in choices]
    unfinished = len(readers)
    try:
        while unfinished:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
