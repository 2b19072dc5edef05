"""Asks a server the same things through LangChain, LiteLLM and Instructor as through OpenAI's own client.

Prints one JSON object: the versions, and whether each way gave what OpenAI's client got. Needs the packages
langchain-openai, litellm and instructor, which are no dependencies of Spool.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "Name the capital of France."}]
TEXT = "The capital of France is"


class Capital(BaseModel):
    country: str
    city: str


def is_capital(arguments: dict[str, object]) -> bool:
    return isinstance(Capital.model_validate(arguments), Capital)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compatibility.frameworks", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    asked = parser.parse_args(arguments)
    found = ask(f"{asked.url}/v1", asked.key)
    packages = ("openai", "langchain-openai", "litellm", "instructor")
    print(json.dumps({"versions": {name: version(name) for name in packages}, "equal": found}))
    return 0 if all(each is True for each in found.values()) else 1


def ask(url: str, key: str) -> dict[str, bool | str]:
    """For each way, True or what was wrong."""
    import instructor
    import litellm
    from langchain_openai import ChatOpenAI, OpenAI
    from openai import OpenAI as Client
    from openai import pydantic_function_tool

    client = Client(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    chat = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24)
    text = client.completions.create(model=model, prompt=TEXT, temperature=0, max_tokens=8)
    parsed = client.chat.completions.parse(
        model=model, messages=QUESTION, temperature=0, max_tokens=100, response_format=Capital
    )
    tool = pydantic_function_tool(Capital)
    called = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=100, tools=[tool], tool_choice="required"
    )
    expected = {
        "call": called.choices[0].message.tool_calls[0].function.arguments,
        "chat": chat.choices[0].message.content,
        "text": text.choices[0].text,
        "parsed": parsed.choices[0].message.parsed,
        "tokens": chat.usage.completion_tokens,
        # Some write more into the prompt, or describe tools in other words, so that the answers are others.
        "a capital": True,
    }

    langchain = ChatOpenAI(model=model, base_url=url, api_key=key, temperature=0, max_tokens=24)
    completions = OpenAI(model=model, base_url=url, api_key=key, temperature=0, max_tokens=8)
    structured = ChatOpenAI(model=model, base_url=url, api_key=key, temperature=0, max_tokens=100)
    bound = structured.bind_tools([Capital], tool_choice="any")
    lite = {"model": f"openai/{model}", "api_base": url, "api_key": key, "messages": QUESTION, "temperature": 0}

    def instructor_gives_a_capital(mode: instructor.Mode) -> bool:
        typed = instructor.from_openai(client, mode=mode)
        answer = typed.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, max_tokens=100, response_model=Capital
        )
        return isinstance(answer, Capital)

    def lite_call() -> object:
        answer = litellm.completion(**lite, max_tokens=100, tools=[tool], tool_choice="required")
        return answer.choices[0].message.tool_calls[0].function.arguments

    def lite_parsed() -> Capital:
        answer = litellm.completion(**lite, max_tokens=100, response_format=Capital)
        return Capital.model_validate_json(answer.choices[0].message.content)

    ways: dict[str, tuple[str, Callable[[], object]]] = {
        "langchain invoke": ("chat", lambda: langchain.invoke(QUESTION).content),
        "langchain stream": ("chat", lambda: "".join(part.content for part in langchain.stream(QUESTION))),
        "langchain batch": ("chat", lambda: langchain.batch([QUESTION] * 3)[2].content),
        "langchain usage": ("tokens", lambda: langchain.invoke(QUESTION).usage_metadata["output_tokens"]),
        "langchain completions": ("text", lambda: completions.invoke(TEXT)),
        "langchain with_structured_output": (
            "parsed",
            lambda: structured.with_structured_output(Capital, method="json_schema").invoke(QUESTION),
        ),
        "litellm completion": (
            "chat",
            lambda: litellm.completion(**lite, max_tokens=24).choices[0].message.content,
        ),
        "litellm stream": (
            "chat",
            lambda: "".join(
                part.choices[0].delta.content or "" for part in litellm.completion(**lite, max_tokens=24, stream=True)
            ),
        ),
        "litellm text_completion": (
            "text",
            lambda: (
                litellm.text_completion(
                    model=f"text-completion-openai/{model}",
                    api_base=url,
                    api_key=key,
                    prompt=TEXT,
                    temperature=0,
                    max_tokens=8,
                )
                .choices[0]
                .text
            ),
        ),
        "litellm response_format": ("parsed", lite_parsed),
        "langchain bind_tools": ("a capital", lambda: is_capital(bound.invoke(QUESTION).tool_calls[0]["args"])),
        "langchain with_structured_output, function_calling": (
            "a capital",
            lambda: isinstance(
                structured.with_structured_output(Capital, method="function_calling").invoke(QUESTION), Capital
            ),
        ),
        "litellm tools": ("call", lite_call),
        "instructor json_schema": ("a capital", lambda: instructor_gives_a_capital(instructor.Mode.JSON_SCHEMA)),
        "instructor tools": ("a capital", lambda: instructor_gives_a_capital(instructor.Mode.TOOLS)),
    }
    found: dict[str, bool | str] = {}
    for name, (what, answer_of) in ways.items():
        try:
            answer = answer_of()
        except Exception as error:  # whatever a package raises is what was found
            found[name] = f"{type(error).__name__}: {error}"[:500]
        else:
            found[name] = answer == expected[what] or f"another answer: {answer!r}"
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
