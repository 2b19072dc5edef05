"""Computes receipts again on the targets that serve: verifies the output of each as if it were a draft's proposal."""

from __future__ import annotations

import asyncio

from spool.scheduler.messages import MAX_PRIORITY, RefusalCause
from spool.services.backend.interface import GenerationRequest
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from spool.services.gateway.api_keys import cache_scope
from spool.services.gateway.completion import CompletionEngine
from spool.services.gateway.errors import invalid
from spool.services.observability.request_ids import current_account, current_request_id
from spool.services.receipts.fingerprint import differences
from spool.services.receipts.receipt import Receipt, ReceiptError
from spool.services.scheduler_client.remote_stream import RemoteStream
from spool.services.text.bounded_json import read_json

# Of the output, tokens in one step after the first. Each takes the step about as long as a sequence that decodes, for
# which all others in the step wait.
_DRAFT_LENGTH = 15


async def replay(text: str, engine: CompletionEngine) -> str | None:
    """None if the targets compute the receipt again bit by bit, else the reason. The key's other requests go first.

    Raises RequestError if the server signs no receipts, for only what it has signed is within its limits; and
    BackendUnavailableError.
    """
    if engine.receipt_key is None:
        raise invalid("this server signs no receipts (gateway.receipt_key_file), and takes none", "receipt")
    _, info = await engine.model(None)
    try:
        receipt = await engine.threads.run(_read, text, engine.receipt_key.public)
        if unlike := differences(receipt.fingerprint, info.fingerprint):
            return f"fingerprint, in the receipt and of the targets: {'; '.join(unlike)}"
        return await _compared(receipt, await _submitted(receipt, engine))
    except ReceiptError as error:
        return str(error)
    except (AdmissionRefusedError, SequenceFailedError) as error:
        return f"it cannot be computed: {error}"


def _read(text: str, public_key: str) -> Receipt:
    """Raises ReceiptError."""
    try:
        data = read_json(text)
    except ValueError as error:
        raise ReceiptError(f"the receipt is no JSON: {error}") from error
    return Receipt.from_json(data, public_key)


async def _submitted(receipt: Receipt, engine: CompletionEngine) -> RemoteStream:
    """Waits while there is no room."""
    request = GenerationRequest(
        prompt=receipt.prompt,
        max_tokens=len(receipt.output),
        sampling=receipt.sampling,
        draft_length=_DRAFT_LENGTH,
        request_id=current_request_id(),
        key=current_account(),
        priority=MAX_PRIORITY,
        cache_scope=cache_scope("", engine.settings.share_prefix_cache),
        logits_digests=True,
        expected_output=receipt.output,
    )
    while True:
        try:
            return await engine.backend.submit(request)
        except AdmissionRefusedError as error:
            if error.cause not in (RefusalCause.QUEUE_FULL, RefusalCause.KEY_LIMIT):
                raise
            await asyncio.sleep(error.retry_after_seconds or 1.0)


async def _compared(receipt: Receipt, stream: RemoteStream) -> str | None:
    tokens: list[int] = []
    digests: list[int] = []
    async with stream:
        async for emission in stream:
            tokens += emission.tokens
            digests += emission.logits_digests
            if difference := receipt.difference(tokens, digests):
                return difference
    for parts in stream.fingerprints.values():
        if unlike := differences(receipt.fingerprint, parts):
            return f"fingerprint, in the receipt and of a target: {'; '.join(unlike)}"
    return None
