"""Answers, structured output and tools of `diffbit serve` through the clients openai, LangChain and instructor.

    pip install openai langchain-openai instructor
    diffbit serve out/smollm2-int4 --port 8080 --api-key secret &
    python examples/clients.py http://127.0.0.1:8080/v1 secret

It prints what each client returns; of a server without a key, leave the key out. The form is guaranteed; whether the
content makes sense depends on the model.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import instructor
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, Field

QUESTION = "What will the weather be in Oslo for the next 2 days?"


class Forecast(BaseModel):
    """Ask for the forecast of a city."""

    city: str = Field(max_length=20)
    days: Literal[1, 2, 3]


@tool
def weather(city: str, days: int) -> str:
    """The weather of a city for the next days."""
    return f"{city}: rain for {days} days"


def with_openai(client: OpenAI, model: str) -> None:
    asked: Any = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 80,
        "temperature": 0,
    }
    print("openai:", client.chat.completions.create(**asked).choices[0].message.content)
    parsed = client.chat.completions.parse(**asked, response_format=Forecast)
    print("openai, parse:", parsed.choices[0].message.parsed)
    schema = Forecast.model_json_schema()
    tools = [{"type": "function", "function": {"name": "forecast", "description": "of a city", "parameters": schema}}]
    answer = client.chat.completions.create(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls or ()
    print("openai, tools:", call.function.name, call.function.arguments, answer.choices[0].finish_reason)
    with client.chat.completions.stream(
        **asked, tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    print("openai, streamed tools:", call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Oslo: rain"}
    asked["messages"] += [answer.choices[0].message, result]
    print("openai, result of a tool:", client.chat.completions.create(**asked).choices[0].message.content)
    response = client.responses.parse(model=model, input=QUESTION, text_format=Forecast, max_output_tokens=80)
    print("openai, responses:", response.output_parsed)
    with client.responses.stream(model=model, input=QUESTION, text_format=Forecast, max_output_tokens=80) as events:
        kinds = [event.type for event in events]
        print("openai, streamed responses:", events.get_final_response().output_parsed, kinds[0], "...", kinds[-1])


def with_langchain(url: str, key: str, model: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key=key, model=model, temperature=0, max_tokens=80)
    print("LangChain:", chat.invoke(QUESTION).content)
    print("LangChain, streamed:", "".join(part.content for part in chat.stream(QUESTION)))
    bound = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    called = bound.invoke(QUESTION)
    print("LangChain, bind_tools:", called.tool_calls)
    result = ToolMessage(weather.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"])
    print("LangChain, result of a tool:", chat.invoke([HumanMessage(QUESTION), called, result]).content)
    parts = list(bound.stream(QUESTION))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    print("LangChain, streamed bind_tools:", whole.tool_calls)
    for method in ("function_calling", "json_schema"):
        print(f"LangChain, {method}:", chat.with_structured_output(Forecast, method=method).invoke(QUESTION))


def with_instructor(client: OpenAI, model: str) -> None:
    asked: Any = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 80,
        "temperature": 0,
    }
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        print(
            f"instructor, {mode.name}:",
            instructor.from_openai(client, mode=mode).create(**asked, response_model=Forecast),
        )


if __name__ == "__main__":
    url, key = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
    client = OpenAI(base_url=url, api_key=key, max_retries=0)
    model = client.models.list().data[0].id
    with_openai(client, model)
    with_langchain(url, key, model)
    with_instructor(client, model)
