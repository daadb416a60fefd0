/** The queue by tenant: the requests under way, as the ledger has them. */

import type { RecentRequests } from "../api_types";
import { Shown, Table, useLoaded } from "../loading";
import { payer } from "../shadow";

const ROWS = 200;
const HEAD = ["Tenant", "Requests under way", "of them without a token yet", "The oldest one's age"];

export function Tenants({ time }: { time: number }) {
  const loaded = useLoaded<RecentRequests>(`api/2.0/requests?status=open&limit=${ROWS}`, time);
  return (
    <Shown loaded={loaded}>
      {({ now_ms: now, requests }) => {
        const tenants = [...new Set(requests.map((one) => one.tenant))].sort();
        if (!tenants.length) return <p class="note">No request is under way.</p>;
        return (
          <>
            <Table caption="Queue by tenant" head={HEAD}>
              {tenants.map((tenant) => {
                const own = requests.filter((one) => one.tenant === tenant);
                return (
                  <tr key={tenant}>
                    <th scope="row" dir="auto">
                      {payer(tenant)}
                    </th>
                    <td>{own.length.toLocaleString()}</td>
                    <td>{own.filter((one) => !one.completion_tokens).length.toLocaleString()}</td>
                    <td>{Math.max(0, ...own.map((one) => now - one.started_ms)).toLocaleString()} ms</td>
                  </tr>
                );
              })}
            </Table>
            {requests.length === ROWS && <p class="note">These are the newest {ROWS} requests.</p>}
          </>
        );
      }}
    </Shown>
  );
}
