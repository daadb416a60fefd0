/** The batches of the key's tenant: start one from a file, watch it, cancel it, and download what it answered. */

import { useEffect, useRef, useState } from "preact/hooks";

import { call } from "../api";
import type { BatchObject, FileObject } from "../api_types";
import { Table } from "../loading";
import { say } from "../status";
import { useAttempts } from "./attempt";
import { Confirm } from "./confirm";
import { Files } from "./files";
import { type Listed, useList } from "./list";
import { NewBatch } from "./new_batch";
import { counts, downloadFile, isOpen, utc } from "./shown";

const HEAD = ["Batch", "State", "Endpoint", "Requests", "Created (UTC)", "Expires (UTC)", "Action"];
const UNNOTICED_SECONDS = 60; // servers that run batches begin sooner

export function Batches() {
  const batches = useList<BatchObject>("v1/batches", (found) => found.some(isOpen));
  const files = useList<FileObject>("v1/files");
  const open = useRef<string[]>([]);
  useEffect(() => {
    if (batches.found === null) return;
    const ended = batches.found.filter((one) => open.current.includes(one.id) && !isOpen(one));
    open.current = batches.found.filter(isOpen).map((one) => one.id);
    if (!ended.length) return;
    say(ended.map((one) => `The batch ${one.id} is ${one.status}: ${counts(one)}.`).join(" "));
    files.reload(); // what it answered
  }, [batches.found]);
  const refresh = () => {
    batches.reload();
    files.reload();
  };
  return (
    <div class="page">
      <h1>Batches</h1>
      <p class="note">
        Requests of a JSONL file, answered in the time that other requests leave. The keys of a tenant share its batches and
        files.
      </p>
      <div class="filters">
        <button type="button" onClick={refresh}>
          Refresh
        </button>
      </div>
      {batches.error && <p class="error">{batches.error}</p>}
      {batches.found === null && !batches.error && <p class="note">Loading …</p>}
      {batches.found !== null && (
        <>
          <Started batches={batches} />
          <section>
            <h2>Start a batch</h2>
            <NewBatch created={refresh} />
          </section>
          <Files files={files} />
        </>
      )}
    </div>
  );
}

function Started({ batches }: { batches: Listed<BatchObject> }) {
  const found = batches.found ?? [];
  return (
    <section>
      <h2>Started batches</h2>
      {found.length ? (
        <Table caption="Batches" head={HEAD}>
          {found.map((one) => (
            <BatchRow key={one.id} one={one} changed={batches.reload} />
          ))}
        </Table>
      ) : (
        <p class="note">There are no batches yet.</p>
      )}
      {batches.earlier && (
        <button type="button" onClick={batches.more}>
          Earlier batches
        </button>
      )}
    </section>
  );
}

function BatchRow({ one, changed }: { one: BatchObject; changed: () => void }) {
  const head = useRef<HTMLTableCellElement>(null);
  const [asked, ask] = useState(false);
  const { error, attempt } = useAttempts();
  const cancel = async () => {
    head.current?.focus(); // the button is going to disappear
    const path = `v1/batches/${encodeURIComponent(one.id)}/cancel`;
    await attempt(() => call(path, { method: "POST", body: {} }), `The batch ${one.id} is being cancelled.`);
    changed();
  };
  const replies = [
    { kind: "output", id: one.output_file_id, name: `${one.id}_output.jsonl` }, // as the server names them
    { kind: "errors", id: one.error_file_id, name: `${one.id}_error.jsonl` },
  ];
  const { total, completed, failed } = one.request_counts;
  return (
    <tr>
      <th scope="row" ref={head} tabIndex={-1}>
        <code>{one.id}</code>
        {Object.entries(one.metadata ?? {}).map(([name, value]) => (
          <div key={name} class="note" dir="auto">
            {name}: {value}
          </div>
        ))}
      </th>
      <td>
        {one.status}
        <Unnoticed one={one} />
        <Reasons one={one} />
      </td>
      <td class="short">{one.endpoint}</td>
      <td>
        {counts(one)}
        {isOpen(one) && total > 0 && <progress aria-label={`Progress of ${one.id}`} value={completed + failed} max={total} />}
      </td>
      <td class="short">{utc(one.created_at)}</td>
      <td class="short">{utc(one.expires_at)}</td>
      <td>
        {replies.map(
          ({ kind, id, name }) =>
            id !== null && (
              <button
                key={kind}
                type="button"
                aria-label={`Download ${kind} of ${one.id}`}
                onClick={() => void attempt(() => downloadFile(id, name), `${name} is downloaded.`)}
              >
                Download {kind}
              </button>
            ),
        )}
        {isOpen(one) && one.status !== "cancelling" && (
          <button type="button" aria-label={`Cancel ${one.id}`} onClick={() => ask(true)}>
            Cancel
          </button>
        )}
        {error && <p class="error">{error}</p>}
        {asked && (
          <Confirm title={`Cancel ${one.id}?`} action="Cancel the batch" act={() => void cancel()} close={() => ask(false)}>
            <p>What was answered stays, and the other requests are not asked. It cannot be resumed.</p>
          </Confirm>
        )}
      </td>
    </tr>
  );
}

/** A hint that no server may be there to run a batch. */
function Unnoticed({ one }: { one: BatchObject }) {
  if (one.status !== "validating" || Date.now() / 1000 - one.created_at < UNNOTICED_SECONDS) return null;
  return (
    <p class="note">
      No server has begun it. One whose <code>batch_concurrency</code> is 0 runs no batches.
    </p>
  );
}

/** The reasons for which the input of a batch was refused. */
function Reasons({ one }: { one: BatchObject }) {
  const found = one.errors?.data ?? [];
  if (!found.length) return null;
  return (
    <details>
      <summary>{found.length === 1 ? "1 reason" : `${found.length} reasons`}</summary>
      <ul>
        {found.map(({ line, message }, place) => (
          <li key={place} dir="auto">
            {line !== null && `line ${line}: `}
            {message}
          </li>
        ))}
      </ul>
    </details>
  );
}
