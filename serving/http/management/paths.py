"""Paths of the management API, for its routes and for the commands that call it."""

from __future__ import annotations

BASE = "/api/2.0"
SERVING_ENDPOINTS = f"{BASE}/serving-endpoints"
KEYS = f"{BASE}/keys"
LIMITS = f"{BASE}/limits"
PRICES = f"{BASE}/prices"
CURRENCY = f"{BASE}/currency"
AUDIT = f"{BASE}/audit"
USAGE = f"{BASE}/usage"
ACCOUNT = f"{BASE}/account"
PAYLOADS = f"{SERVING_ENDPOINTS}/<name>/payloads"
REQUESTS = f"{BASE}/requests"
RECEIPTS = f"{BASE}/receipts/<name>"
RECEIPT_KEYS = "/.well-known/mlflow-llm-receipts"
ENGINE_HOSTS = f"{BASE}/engine-hosts"
PROMPTS = f"{BASE}/prompts"
