/** A form that uploads a file of requests and starts a batch of it; a refusal is shown at the field that it names. */

import { useEffect, useRef, useState } from "preact/hooks";

import { ApiError, call, messageOf } from "../api";
import type { BatchObject, FileObject } from "../api_types";
import { say } from "../status";

const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];
const PEEKED = 65_536; // bytes of a file in which its first request is looked for
const REFUSED_FILE = [400, 413, 429]; // statuses of an upload that is itself refused

type Field = "file" | "endpoint" | "window" | "metadata";

const FIELDS: Record<string, Field> = {
  input_file_id: "file",
  file_id: "file",
  endpoint: "endpoint",
  completion_window: "window",
  metadata: "metadata",
};

interface Problem {
  field: Field | null; // null: it is no field's
  message: string;
}

class Refused extends Error {
  constructor(readonly problem: Problem) {
    super(problem.message);
  }
}

interface Uploaded {
  file: File;
  id: string;
}

export function NewBatch({ created }: { created: () => void }) {
  const form = useRef<HTMLFormElement>(null);
  const uploaded = useRef<Uploaded | null>(null); // of an attempt that was refused afterwards
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState<Problem | null>(null);
  useEffect(() => {
    if (problem === null) return;
    if (problem.field === null) say(problem.message);
    else (form.current?.elements.namedItem(problem.field) as HTMLElement | null)?.focus();
  }, [problem]);
  const start = async () => {
    if (form.current === null || busy) return;
    const given = new FormData(form.current);
    const text = (name: Field) => String(given.get(name) ?? "").trim();
    setBusy(true);
    try {
      const metadata = asMetadata(text("metadata"));
      const file = given.get("file") as File;
      if (!sameFile(uploaded.current?.file, file)) uploaded.current = { file, id: await upload(file) };
      const body = {
        input_file_id: uploaded.current?.id,
        endpoint: text("endpoint"),
        completion_window: text("window"),
        ...(metadata === null ? {} : { metadata }),
      };
      const batch = await create(body);
      uploaded.current = null;
      setProblem(null);
      form.current?.reset();
      say(`The batch ${batch.id} is created.`);
    } catch (error) {
      const refused = error instanceof Refused ? error.problem : { field: null, message: messageOf(error) };
      if (refused.field === "file") uploaded.current = null;
      setProblem(refused);
    }
    setBusy(false);
    created(); // a file that was uploaded for nothing is listed too
  };
  /** Choose the endpoint that the first request of a file has. */
  const peek = async (file: File | undefined) => {
    const url = file === undefined ? "" : await urlOf(file);
    const choice = form.current?.elements.namedItem("endpoint") as HTMLSelectElement | null;
    if (choice !== null && choice !== undefined && ENDPOINTS.includes(url)) choice.value = url;
  };
  const wrong = (field: Field) =>
    problem?.field === field ? { "aria-invalid": true, "aria-describedby": `new-batch-${field}-error` } : {};
  const reason = (field: Field) =>
    problem?.field === field && (
      <p id={`new-batch-${field}-error`} class="error" dir="auto">
        {problem.message}
      </p>
    );
  return (
    <form
      ref={form}
      class="new-key"
      aria-label="Start a batch"
      autocomplete="off"
      onSubmit={(event) => {
        event.preventDefault();
        void start();
      }}
    >
      <div class="fields">
        <div>
          <label for="new-batch-file">JSONL file, a request a line</label>
          <input
            id="new-batch-file"
            name="file"
            type="file"
            accept=".jsonl,application/jsonl,application/x-ndjson"
            required
            onChange={(event) => void peek(event.currentTarget.files?.[0])}
            {...wrong("file")}
          />
          {reason("file")}
        </div>
        <div>
          <label for="new-batch-endpoint">Endpoint of its requests</label>
          <select id="new-batch-endpoint" name="endpoint" {...wrong("endpoint")}>
            {ENDPOINTS.map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
          {reason("endpoint")}
        </div>
        <div>
          <label for="new-batch-window">Completion window, in hours such as 24h</label>
          <input id="new-batch-window" name="window" defaultValue="24h" required maxLength={16} {...wrong("window")} />
          {reason("window")}
        </div>
        <div>
          <label for="new-batch-metadata">Metadata: name=value, one a line</label>
          <textarea id="new-batch-metadata" name="metadata" rows={2} dir="auto" {...wrong("metadata")} />
          {reason("metadata")}
        </div>
      </div>
      {problem?.field === null && <p class="error">{problem.message}</p>}
      {busy && <p class="note">The file is being uploaded …</p>}
      <button type="submit" class="primary">
        Start the batch
      </button>
    </form>
  );
}

/** Return whether two choices of a file are one: forms give a new object for each. */
function sameFile(one: File | undefined, other: File): boolean {
  return one?.name === other.name && one.size === other.size && one.lastModified === other.lastModified;
}

async function upload(file: File): Promise<string> {
  const body = new FormData();
  body.append("purpose", "batch");
  body.append("file", file);
  try {
    return ((await (await call("v1/files", { method: "POST", body })).json()) as FileObject).id;
  } catch (error) {
    if (!(error instanceof ApiError) || !REFUSED_FILE.includes(error.status)) throw error;
    throw new Refused({ field: "file", message: error.message });
  }
}

async function create(body: object): Promise<BatchObject> {
  try {
    return (await (await call("v1/batches", { method: "POST", body })).json()) as BatchObject;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const [name = ""] = (error.param ?? "").split(".");
    throw new Refused({ field: FIELDS[name] ?? null, message: error.message });
  }
}

/** Return the labels that were entered; null for none. */
function asMetadata(text: string): Record<string, string> | null {
  const found = new Map<string, string>();
  for (const line of text.split("\n").filter((one) => one.trim())) {
    const [name = "", ...value] = line.split("=");
    const problem = (message: string) => new Refused({ field: "metadata", message: `${line.trim()}: ${message}` });
    if (!value.length) throw problem('expected name=value, but it has no "="');
    if (found.has(name.trim())) throw problem("another line has the same name");
    found.set(name.trim(), value.join("=").trim());
  }
  return found.size ? Object.fromEntries(found) : null;
}

async function urlOf(file: File): Promise<string> {
  try {
    const [line = ""] = (await file.slice(0, PEEKED).text()).trimStart().split("\n", 1);
    const { url } = JSON.parse(line) as { url?: unknown };
    return typeof url === "string" ? url : "";
  } catch {
    return ""; // not one of requests: the server says what is wrong
  }
}
