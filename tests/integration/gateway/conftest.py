"""Gateways over stand-in workers of known output, and clients of these gateways."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import httpx
import openai
import pytest

from spool.client.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.gateway.expected import STEP_SECONDS, TIMEOUT
from tests.support.gateway import Gateways, Served, stand_in_gateways


@pytest.fixture(scope="session")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with stand_in_gateways(tmp_path_factory.mktemp("model"), step_seconds=0.001) as gateways:
        yield gateways


@pytest.fixture(scope="session")
def served(gateways: Gateways) -> Iterator[Served]:
    with gateways.serve() as served:
        yield served


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=TIMEOUT) as client:
        yield client


@pytest.fixture(scope="session")
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address) as channel:
        yield channel


@pytest.fixture(scope="session")
def stub(channel: grpc.Channel) -> GenerationServiceStub:
    return GenerationServiceStub(channel)


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with stand_in_gateways(tmp_path_factory.mktemp("slow"), step_seconds=STEP_SECONDS) as gateways:
        yield gateways


@pytest.fixture(scope="session")
def slowly_served(slow: Gateways) -> Iterator[Served]:
    with slow.serve() as served:
        yield served


@pytest.fixture(autouse=True)
def _nothing_stays_behind(gateways: Gateways) -> Iterator[None]:
    yield
    gateways.wait_until_idle()
