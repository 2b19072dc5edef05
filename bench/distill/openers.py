"""Beginnings of user turns by kind of task; the target writes the rest. In our own words, from no data set."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OPENERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "translation": (
            "Translate this German sentence into English: ",
            'Please translate from German: "',
            'What does this mean in English? "Die ',
            "English translation, please: Der ",
            "Give me the English version of the following German text: Wir ",
            "Translate to English: Es ",
            'Turn this German line into English: "Ich ',
            "German to English. Das ",
        ),
        "summary": (
            "Write a short summary of this article: ",
            "Sum up the following news report in a few sentences. ",
            "Here is an article. Summarise it.\n\n",
            "TL;DR of this text, please: ",
            "Please condense this news story: ",
            "Give the main points of the story below.\n\nBy ",
        ),
        "question": (
            "Who ",
            "When did ",
            "Where is ",
            "What is the name of ",
            "How many ",
            "In which year ",
            "Which country ",
            "what is the difference between ",
            "who wrote ",
            "who plays ",
            "when was the first ",
            "where does the ",
        ),
        "arithmetic": (
            "Solve this word problem step by step: ",
            "A farmer has ",
            "Sarah buys ",
            "Tom had ",
            "A train travels ",
            "If a box holds ",
            "There are 24 ",
            "A shop sells ",
            "Each week, ",
            "Maria earns $",
        ),
        "passages": (
            "Use the passages below to answer the question.\n\nPassage 1: ",
            "Here are three documents.\n[1] ",
            "Answer the question from these search results.\nDocument [1] Title: ",
            "Given this context, answer briefly.\nContext: ",
            "Read the text and answer the question that follows it.\n\n",
        ),
        "writing": (
            "Write a short story about ",
            "Write an email to ",
            "Compose a poem about ",
            "Draft a blog post on ",
            "Imagine you are ",
            "Pretend to be ",
            "You are a ",
        ),
        "explanation": (
            "Explain ",
            "Describe how ",
            "What are the main causes of ",
            "Why do ",
            "How does ",
            "Compare ",
        ),
        "code": (
            "Write a Python function that ",
            "Implement in C++ ",
            "Fix this code: ",
            "Write a SQL query that ",
            "Explain this code:\n```python\n",
        ),
        "extraction": (
            "Extract all names from this text: ",
            "List the dates in the following passage: ",
            "Rate each review from 1 to 5 and answer as JSON.\n",
            "Identify the people and places mentioned: ",
        ),
        "reasoning": (
            "If all ",
            "Which of these does not belong: ",
            "Think step by step: ",
            "Is it true that ",
        ),
    }
)
