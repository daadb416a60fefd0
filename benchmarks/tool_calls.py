"""Validity of forced, named and strict calls of random tools, sampled at temperature 1, with their arguments checked by
jsonschema.

Each request has its own seed and some of the tools below; they run `--concurrency` at a time through the loaded model,
as a notebook's would. What is cut by its length is counted apart: only so may a call be incomplete.

    python benchmarks/tool_calls.py --model .cache/models/smollm2 --calls 1000
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from measured import say_kernels
from report import publish

SHORT = {"type": "string", "maxLength": 24}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": SHORT, "unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "book_table": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"},
            "day": {"type": "string", "format": "date"},
            "guests": {"type": "integer", "minimum": 1, "maximum": 12},
            "notes": {"anyOf": [SHORT, {"type": "null"}]},
        },
        "required": ["name", "day", "guests"],
    },
    "search": {
        "type": "object",
        "properties": {
            "query": SHORT,
            "tags": {"type": "array", "items": {"enum": ["news", "blog", "code"]}, "maxItems": 2},
            "range": {"$ref": "#/$defs/range"},
        },
        "required": ["query", "tags"],
        "$defs": {
            "range": {
                "type": "object",
                "properties": {"low": {"type": "number"}, "high": {"type": "number"}},
                "required": ["low", "high"],
                "additionalProperties": False,
            }
        },
    },
    "set_light": {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
        "required": ["room", "on"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
ASKED = ("What is the weather in Rome?", "Book a table for four on Friday.", "Find news of code.", "Light, please!")
KINDS = ("required", "named", "single", "strict")


def body(number: int, kind: str, max_tokens: int) -> dict[str, Any]:
    """Return a request with some tools and a question, drawn by its number."""
    rng = random.Random(number)
    names = rng.sample(list(SCHEMAS), rng.randint(1, len(SCHEMAS)))
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": name, "parameters": SCHEMAS[name], "strict": kind == "strict"},
        }
        for name in names
    ]
    found: dict[str, Any] = {
        "messages": [{"role": "user", "content": rng.choice(ASKED)}],
        "tools": tools,
        "temperature": 1.0,
        "seed": number,
        "max_tokens": max_tokens,
        "tool_choice": "required",
    }
    if kind == "named":
        found["tool_choice"] = {"type": "function", "function": {"name": names[0]}}
    if kind == "single":
        found["parallel_tool_calls"] = False
    return found


def judge(asked: dict[str, Any], reply: dict[str, Any], kind: str) -> Counter[str]:
    """Return the numbers of calls, of cut ones, and of errors by their names."""
    import jsonschema

    choice = reply["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    found = Counter({"calls": len(calls), "replies": 1})
    if choice["finish_reason"] == "length":
        found["cut by length"] += 1
        calls = calls[:-1]  # the last call may be cut
    elif not calls:
        found["wrong: no call"] += 1
    elif len(calls) > 1 and kind in ("named", "single"):
        found["wrong: more than one call"] += 1
    known = {tool["function"]["name"] for tool in asked["tools"]}
    for call in calls:
        name = call["function"]["name"]
        if name not in known or (kind == "named" and name != asked["tool_choice"]["function"]["name"]):
            found["wrong: another function"] += 1
            continue
        try:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])
        except (ValueError, jsonschema.ValidationError):
            found["wrong: arguments"] += 1
    return found


def measure(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        found: Counter[str] = Counter()
        began, number = time.perf_counter(), 1000 * KINDS.index(kind)
        with ThreadPoolExecutor(args.concurrency) as pool:
            while found["calls"] - found["cut by length"] < args.calls // len(KINDS):
                bodies = [body(number + i, kind, args.max_tokens) for i in range(args.concurrency)]
                number += len(bodies)
                for asked, reply in zip(bodies, pool.map(model.predict, bodies), strict=True):
                    found += judge(asked, reply, kind)
        wrong = sum(count for name, count in found.items() if name.startswith("wrong"))
        rows.append(
            {
                "calls": kind,
                "replies": found["replies"],
                "number": found["calls"],
                "cut by length": found["cut by length"],
                "invalid": wrong,
                "calls/s": round(found["calls"] / (time.perf_counter() - began), 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--calls", type=int, default=1000, help="how many, over all kinds")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--tool-format", help="another format than the one that the model's template has")
    args = parser.parse_args()
    say_kernels()

    import mlflow

    from mlflow_llm.flavors import llm

    with tempfile.TemporaryDirectory() as folder:
        llm.save_model(f"{folder}/m", args.model, link_files=True, tool_format=args.tool_format)
        model = mlflow.pyfunc.load_model(f"{folder}/m", model_config={"max_num_seqs": args.concurrency})
        publish("tool_calls", measure(model, args))


if __name__ == "__main__":
    main()
