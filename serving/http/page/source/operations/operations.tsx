/** What an operator watches and changes: endpoints and engines, requests, usage, keys, limits, prices, audit log. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";

import type { EndpointInfos, ServerHealth } from "../api_types";
import { Shown, useLoaded } from "../loading";
import { UsageReport } from "../usage/report";
import { AuditLog } from "./audit";
import { Endpoints } from "./endpoints";
import { Engines } from "./engines";
import { Keys } from "./keys";
import { Limits } from "./limits";
import { Prices } from "./prices";
import { Recent } from "./recent";
import { Tenants } from "./tenants";

const SECONDS = 5;

export function Operations() {
  const [time, setTime] = useState(0);
  const endpoints = useLoaded<EndpointInfos>("api/2.0/serving-endpoints", time);
  const health = useLoaded<ServerHealth>("health", time);
  const [watches, watch] = useState(true);
  const refresh = () => setTime((n) => n + 1);
  useEffect(() => {
    if (!watches) return;
    const timer = setInterval(() => document.hidden || refresh(), SECONDS * 1000);
    return () => clearInterval(timer);
  }, [watches]);
  return (
    <div class="page">
      <h1>Operations</h1>
      <div class="filters">
        <button type="button" onClick={refresh}>
          Refresh
        </button>
        <label class="check">
          <input type="checkbox" checked={watches} onChange={(event) => watch(event.currentTarget.checked)} />
          every {SECONDS} seconds
        </label>
      </div>
      <section>
        <h2>Endpoints</h2>
        <Shown loaded={endpoints}>{({ endpoints: found }) => <Endpoints found={found} changed={refresh} />}</Shown>
      </section>
      <section>
        <h2>Engines</h2>
        <Shown loaded={health}>{(found) => <Engines found={found.endpoints ?? {}} time={time} />}</Shown>
      </section>
      <section>
        <h2>Queue by tenant</h2>
        <Tenants time={time} />
      </section>
      <section>
        <h2>Recent requests</h2>
        <Recent time={time} />
      </section>
      <section>
        <h2>Keys</h2>
        <Keys />
      </section>
      <Folded title="Limits">{() => <Limits />}</Folded>
      <Folded title="Usage">{() => <UsageReport groups={["endpoint", "entity", "adapter", "tenant", "key_id"]} filters />}</Folded>
      <Folded title="Prices">{() => <Prices />}</Folded>
      <Folded title="Audit log">{() => <AuditLog />}</Folded>
    </div>
  );
}

/** A section that asks the server when it is opened. */
function Folded({ title, children }: { title: string; children: () => ComponentChildren }) {
  const [open, setOpen] = useState(false);
  return (
    <details class="section" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <h2>{title}</h2>
      </summary>
      {open && children()}
    </details>
  );
}
