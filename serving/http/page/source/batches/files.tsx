/** The files of the key's tenant: uploads and what batches answered. */

import { useRef, useState } from "preact/hooks";

import { call } from "../api";
import type { FileObject } from "../api_types";
import { Table } from "../loading";
import { useAttempts } from "./attempt";
import { Confirm } from "./confirm";
import type { Listed } from "./list";
import { downloadFile, size, utc } from "./shown";

const PURPOSES = { batch: "requests", batch_output: "replies" } as const;
const HEAD = ["File", "Has", "Size", "Created (UTC)", "Kept until (UTC)", "Action"];

export function Files({ files }: { files: Listed<FileObject> }) {
  const title = useRef<HTMLHeadingElement>(null);
  const deleted = () => {
    title.current?.focus(); // the row is going to disappear
    files.reload();
  };
  return (
    <section>
      <h2 ref={title} tabIndex={-1}>
        Files
      </h2>
      {files.error && <p class="error">{files.error}</p>}
      {files.found?.length === 0 && <p class="note">There are no files yet.</p>}
      {!!files.found?.length && (
        <Table caption="Files" head={HEAD}>
          {files.found.map((one) => (
            <FileRow key={one.id} one={one} deleted={deleted} />
          ))}
        </Table>
      )}
      {files.earlier && (
        <button type="button" onClick={files.more}>
          Earlier files
        </button>
      )}
    </section>
  );
}

function FileRow({ one, deleted }: { one: FileObject; deleted: () => void }) {
  const head = useRef<HTMLTableCellElement>(null);
  const [asked, ask] = useState(false);
  const { error, attempt } = useAttempts();
  const remove = async () => {
    head.current?.focus();
    const path = `v1/files/${encodeURIComponent(one.id)}`;
    if (await attempt(() => call(path, { method: "DELETE" }), `The file ${one.filename} is deleted.`)) deleted();
  };
  return (
    <tr>
      <th scope="row" ref={head} tabIndex={-1}>
        <span dir="auto">{one.filename}</span>
        <div class="note">
          <code>{one.id}</code>
        </div>
      </th>
      <td>{PURPOSES[one.purpose]}</td>
      <td class="short">{size(one.bytes)}</td>
      <td class="short">{utc(one.created_at)}</td>
      <td class="short">{one.expires_at === null ? "no end" : utc(one.expires_at)}</td>
      <td>
        <button
          type="button"
          aria-label={`Download ${one.filename}, ${one.id}`}
          onClick={() => void attempt(() => downloadFile(one.id, one.filename), `The file ${one.filename} is downloaded.`)}
        >
          Download
        </button>
        <button type="button" aria-label={`Delete ${one.filename}, ${one.id}`} onClick={() => ask(true)}>
          Delete
        </button>
        {error && <p class="error">{error}</p>}
        {asked && (
          <Confirm title="Delete this file?" action="Delete the file" act={() => void remove()} close={() => ask(false)}>
            <p dir="auto">
              {one.filename}, {size(one.bytes)}. It cannot be restored.
            </p>
          </Confirm>
        )}
      </td>
    </tr>
  );
}
