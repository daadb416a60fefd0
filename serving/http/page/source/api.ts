/** Calls of the server's API. Paths are relative to the page, so that it works behind a path prefix. */

import { signal } from "@preact/signals";

const STORED_KEY = `mlflow-llm ${location.pathname} key`;

/** The API key of this tab: gone when the tab is closed, never written to the disk by the page. */
export const apiKey = signal(read(STORED_KEY));

/** Whether the server refused the last request because of its key. */
export const keyRefused = signal(false);

function read(name: string): string {
  try {
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return ""; // storage is blocked: the key lives in memory
  }
}

export function setKey(key: string): void {
  apiKey.value = key;
  keyRefused.value = false;
  try {
    if (key) sessionStorage.setItem(STORED_KEY, key);
    else sessionStorage.removeItem(STORED_KEY);
  } catch {
    // storage is blocked: the key lives in memory
  }
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param: string | null = null, // the field that is wrong, if the server names one
  ) {
    super(message);
  }
}

export interface Call {
  method?: string;
  body?: unknown; // sent as JSON, or as it is if it is a form with a file
  signal?: AbortSignal;
}

/** Send a request; reject with an `ApiError` that has the server's own message for every status but 2xx. */
export async function call(path: string, { method = "GET", body, signal: abort }: Call = {}): Promise<Response> {
  const headers: Record<string, string> = {};
  if (apiKey.value) headers["Authorization"] = `Bearer ${apiKey.value}`;
  const isForm = body instanceof FormData; // the browser says its type, with the boundary
  if (body !== undefined && !isForm) headers["Content-Type"] = "application/json";
  let response: Response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method,
      headers,
      credentials: "same-origin",
      cache: "no-store",
      ...(body === undefined ? {} : { body: isForm ? body : JSON.stringify(body) }),
      ...(abort === undefined ? {} : { signal: abort }),
    });
  } catch (error) {
    if (abort?.aborted) throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  keyRefused.value = response.status === 401;
  if (!response.ok) throw await errorOf(response);
  return response;
}

export async function getJson<T>(path: string): Promise<T> {
  return (await (await call(path)).json()) as T;
}

interface ErrorBody {
  error?: { message?: string; param?: string | null } | string;
  message?: string;
}

async function errorOf(response: Response): Promise<ApiError> {
  const text = await response.text();
  try {
    const body = JSON.parse(text) as ErrorBody;
    const { error } = body;
    const found = typeof error === "object" ? error.message : (body.message ?? error);
    if (found) return new ApiError(response.status, found, typeof error === "object" ? error.param : null);
  } catch {
    // not JSON: a proxy's page
  }
  return new ApiError(response.status, `The server answered with status ${response.status}.`);
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Yield the data of each server-sent event of a response. */
export async function* serverSentEvents(response: Response): AsyncGenerator<string> {
  if (response.body === null) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      const events = buffer.split(/\r?\n\r?\n/);
      buffer = events.pop() ?? "";
      for (const event of events) {
        const data = event
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).replace(/^ /, ""));
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
