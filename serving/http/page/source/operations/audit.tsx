/** The audit log: who changed what, newest first, in pages. */

import { useState } from "preact/hooks";

import { call, messageOf } from "../api";
import type { AuditPage } from "../api_types";
import { Shown, Table, useLoaded } from "../loading";

export function AuditLog() {
  const first = useLoaded<AuditPage>("api/2.0/audit?limit=50");
  const [more, setMore] = useState<AuditPage[]>([]);
  const [problem, setProblem] = useState("");
  const next = async (cursor: string) => {
    try {
      const response = await call(`api/2.0/audit?limit=50&cursor=${encodeURIComponent(cursor)}`);
      const page = (await response.json()) as AuditPage;
      setMore((known) => [...known, page]);
      setProblem("");
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  return (
    <Shown loaded={first}>
      {(page) => {
        const pages = [page, ...more];
        const entries = pages.flatMap((one) => one.audit);
        const cursor = pages[pages.length - 1]?.next_cursor;
        if (!entries.length) return <p class="note">Nothing was changed yet.</p>;
        return (
          <>
            <Table caption="Audit log" head={["Time (UTC)", "Who", "Action", "On", "Before → after"]}>
              {entries.map((one) => (
                <tr key={one.id}>
                  <td>{new Date(one.at_ms).toISOString().slice(0, 19).replace("T", " ")}</td>
                  <td dir="auto">
                    {one.actor} ({one.via})
                  </td>
                  <td>{one.action}</td>
                  <td dir="auto">{one.target}</td>
                  <td>
                    <details>
                      <summary>Show</summary>
                      <pre tabIndex={0} role="region" aria-label={`Change ${one.id}`}>
                        {JSON.stringify({ before: one.before, after: one.after }, null, 2)}
                      </pre>
                    </details>
                  </td>
                </tr>
              ))}
            </Table>
            {problem && <p class="error">{problem}</p>}
            {cursor && (
              <button type="button" onClick={() => void next(cursor)}>
                Earlier entries
              </button>
            )}
          </>
        );
      }}
    </Shown>
  );
}
