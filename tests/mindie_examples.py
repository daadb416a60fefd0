"""The requests that MindIE's documents print, with an endpoint's name in the place of the printed model's."""

from __future__ import annotations

from typing import Any

SAMPLING: dict[str, Any] = {
    "stream": False,
    "presence_penalty": 1.03,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.0,
    "temperature": 0.5,
    "top_p": 0.95,
    "top_k": -1,
    "seed": None,
    "stop": ["stop1", "stop2"],
    "stop_token_ids": [2, 13],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "ignore_eos": False,
    "max_tokens": 20,
}
SINGLE = {"messages": [{"role": "user", "content": "You are a helpful assistant."}], **SAMPLING}
PARTS = [
    {"type": "text", "text": "My name is Olivier and I"},
    {"type": "image_url", "image_url": "/xxxx/test.png"},
]
MEDIA = {"messages": [{"role": "user", "content": PARTS}], **SAMPLING}
WHERE = "Hi, can you tell me the delivery date for my order? my order id is 12345."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_delivery_date",
            "strict": True,
            "description": "Get the delivery date for a customer's order. Call this whenever you need to know the "
            "delivery date, for example when a customer asks 'Where is my package'",
            "parameters": {
                "type": "object",
                "properties": {"order_id": {"type": "string", "description": "The customer's order ID."}},
                "required": ["order_id"],
                "additionalProperties": False,
            },
        },
    }
]
FIRST_ROUND = {
    "messages": [
        {"role": "system", "content": "You are a student who is good at math."},
        {"role": "user", "content": WHERE},
    ],
    **{name: value for name, value in SAMPLING.items() if name != "include_stop_str_in_output"},
    "max_tokens": 1024,
    "tools": TOOLS,
    "tool_choice": "auto",
}
SECOND_ROUND = {
    "messages": [
        {
            "role": "system",
            "content": "You are a helpful customer support assistant. Use the supplied tools to assist the user.",
        },
        {"role": "user", "content": WHERE},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "function": {"arguments": '{"order_id": "12345"}', "name": "get_delivery_date"},
                    "id": "tool_call_8p2Nk",
                    "type": "function",
                }
            ],
        },
        {"role": "tool", "content": "the delivery date is 2024.09.10.", "tool_call_id": "tool_call_8p2Nk"},
    ],
    "stream": False,
    "repetition_penalty": 1.1,
    "temperature": 0.9,
    "top_p": 1,
    "max_tokens": 1024,
    "tools": TOOLS,
    "tool_choice": "auto",
}
CHATS = {"single": SINGLE, "first-round": FIRST_ROUND, "second-round": SECOND_ROUND}
GENERATE = {
    "id": "a123",
    "text_input": "My name is Olivier and I",
    "parameters": {
        "details": True,
        "do_sample": True,
        "max_new_tokens": 200,
        "repetition_penalty": 1.1,
        "seed": 123,
        "temperature": 1,
        "top_k": 10,
        "top_p": 0.99,
        "batch_size": 100,
        "typical_p": 0.5,
        "watermark": False,
        "perf_stat": False,
    },
}
