/** The newest requests, as the ledger has them: status, times and tokens; texts where the endpoint logs them. */

import { useState } from "preact/hooks";

import type { RecentRequests } from "../api_types";
import { Shown, Table, useLoaded } from "../loading";
import { SHADOW } from "../shadow";
import { PayloadDialog } from "./payload_log";

const HEAD = ["Started (UTC)", "Status", "Took", "Model", "Tenant", "Key", "Prompt", "Answer", "Request", "Text"];
const ROWS = 30;

export function Recent({ time }: { time: number }) {
  const loaded = useLoaded<RecentRequests>(`api/2.0/requests?limit=${ROWS}`, time);
  const [opened, open] = useState<{ endpoint: string; request: string } | null>(null);
  return (
    <>
      {opened && <PayloadDialog {...opened} close={() => open(null)} />}
      <Shown loaded={loaded}>
      {({ now_ms: now, requests }) =>
        requests.length ? (
          <Table caption="Recent requests" head={HEAD}>
            {requests.map((one) => (
              <tr key={one.request_id}>
                <th scope="row">{new Date(one.started_ms).toISOString().slice(11, 23)}</th>
                <td>
                  {one.status === "open" ? "running" : one.status}
                  {one.finish_reason && ` (${one.finish_reason})`}
                </td>
                <td class="short">{(one.ended_ms ?? now) - one.started_ms} ms</td>
                <td dir="auto">
                  {one.adapter ? `${one.endpoint}:${one.adapter}` : one.endpoint}
                  {one.tenant === SHADOW && ` (a copy, for the shadow ${one.entity})`}
                </td>
                <td dir="auto">{one.tenant}</td>
                <td>{one.key_id}</td>
                <td>{one.prompt_tokens.toLocaleString()}</td>
                <td>{one.completion_tokens.toLocaleString()}</td>
                <td class="id">{one.request_id}</td>
                <td>
                  {one.has_payload ? (
                    <button
                      type="button"
                      aria-label={`Text of request ${one.request_id}`}
                      onClick={() => open({ endpoint: one.endpoint, request: one.request_id })}
                    >
                      Text
                    </button>
                  ) : (
                    "–"
                  )}
                </td>
              </tr>
            ))}
          </Table>
        ) : (
          <p class="note">There was no request yet.</p>
        )
      }
      </Shown>
    </>
  );
}
