/** What an operator watches and changes: endpoints and their engines, limits, keys. */

import { useEffect, useState } from "preact/hooks";

import { Shown, Table, useLoaded } from "../loading";
import { Keys } from "./keys";

interface Endpoint {
  name: string;
  state: { ready: string; config_update: string; message?: string };
  config?: Config;
  pending_config?: Config;
}

interface Config {
  config_version: number;
  served_entities: { name: string; entity_name: string; entity_version: string }[];
  traffic_config: { routes: { served_entity_name: string; traffic_percentage: number }[] };
}

interface EngineState {
  status: string;
  running?: number;
  waiting?: number;
  steps?: number;
  kernels?: string;
  quantization?: string;
  memory?: number;
  unloaded?: string;
  entities?: Record<string, EngineState>;
}

interface LimitRow {
  scope: string;
  subject: string;
  kind: string;
  value: number | string;
}

const SECONDS = 5;

export function Operations() {
  const endpoints = useLoaded<{ endpoints: Endpoint[] }>("api/2.0/serving-endpoints");
  const health = useLoaded<{ endpoints?: Record<string, EngineState> }>("health");
  const limits = useLoaded<{ currency: string; limits: LimitRow[] }>("api/2.0/limits");
  const [watches, watch] = useState(false);
  const refresh = () => [endpoints, health, limits].forEach((one) => one.reload());
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
        <Shown loaded={endpoints}>{({ endpoints: found }) => <Endpoints found={found} />}</Shown>
      </section>
      <section>
        <h2>Engines</h2>
        <Shown loaded={health}>{(found) => <Engines found={found.endpoints ?? {}} />}</Shown>
      </section>
      <section>
        <h2>Keys</h2>
        <Keys />
      </section>
      <section>
        <h2>Limits</h2>
        <Shown loaded={limits}>
          {(found) =>
            found.limits.length ? (
              <Table caption="Limits" head={["Scope", "Of", "Kind", "Value"]}>
                {found.limits.map((one) => (
                  <tr key={`${one.scope} ${one.subject} ${one.kind}`}>
                    <td>{one.scope}</td>
                    <td dir="auto">{one.subject}</td>
                    <td>{one.kind}</td>
                    <td>{one.value}</td>
                  </tr>
                ))}
              </Table>
            ) : (
              <p class="note">No limits are set.</p>
            )
          }
        </Shown>
      </section>
    </div>
  );
}

function Endpoints({ found }: { found: Endpoint[] }) {
  if (!found.length) return <p class="note">There are no endpoints.</p>;
  return (
    <Table caption="Endpoints" head={["Endpoint", "State", "Version", "Served models and their traffic", "Message"]}>
      {found.map(({ name, state, config, pending_config: pending }) => (
        <tr key={name}>
          <th scope="row" dir="auto">
            {name}
          </th>
          <td>
            {state.ready}
            {state.config_update !== "NOT_UPDATING" && `, ${state.config_update}`}
          </td>
          <td>
            {config?.config_version}
            {pending && ` → ${pending.config_version}`}
          </td>
          <td>
            <Traffic config={config} />
            {pending && (
              <>
                next: <Traffic config={pending} />
              </>
            )}
          </td>
          <td dir="auto">{state.message}</td>
        </tr>
      ))}
    </Table>
  );
}

function Traffic({ config }: { config: Config | undefined }) {
  if (config === undefined) return <>–</>;
  return (
    <ul class="plain">
      {config.served_entities.map(({ name, entity_name, entity_version }) => {
        const share = config.traffic_config.routes.find((one) => one.served_entity_name === name)?.traffic_percentage ?? 0;
        return (
          <li key={name} dir="auto">
            {entity_name}
            {entity_version && ` version ${entity_version}`}: {share} %
          </li>
        );
      })}
    </ul>
  );
}

function Engines({ found }: { found: Record<string, EngineState> }) {
  const rows = Object.entries(found).flatMap(([endpoint, state]): [string, string, EngineState][] =>
    state.entities
      ? Object.entries(state.entities).map(([entity, one]) => [endpoint, entity, one])
      : [[endpoint, "", state]],
  );
  if (!rows.length) return <p class="note">There are no engines.</p>;
  const head = ["Endpoint", "Served model", "State", "Running", "Waiting", "Steps", "Kernels", "Weights", "Memory"];
  return (
    <Table caption="Engines" head={head}>
      {rows.map(([endpoint, entity, state]) => (
        <tr key={`${endpoint} ${entity}`}>
          <th scope="row" dir="auto">
            {endpoint}
          </th>
          <td dir="auto">{entity || "–"}</td>
          <td>{state.unloaded ? `unloaded: ${state.unloaded}` : state.status}</td>
          <td>{state.running ?? "–"}</td>
          <td>{state.waiting ?? "–"}</td>
          <td>{state.steps?.toLocaleString() ?? "–"}</td>
          <td>{state.kernels ?? "–"}</td>
          <td>{state.quantization ?? "as stored"}</td>
          <td>{state.memory === undefined ? "–" : `${(state.memory / 2 ** 20).toFixed(0)} MiB`}</td>
        </tr>
      ))}
    </Table>
  );
}
