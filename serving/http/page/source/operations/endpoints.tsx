/** Endpoints: state, version, traffic, and a rollout with its progress or the reason why it failed. */

import { useState } from "preact/hooks";

import { call, messageOf } from "../api";
import type { ConfigInfo, EndpointInfo, EngineLogs, ServedEntityInfo } from "../api_types";
import { Dialog } from "../dialog";
import { Table } from "../loading";
import { PayloadLogSwitch } from "./payload_log";
import { TrafficEditor, sharersOf } from "./traffic";

export function shareOf(config: ConfigInfo, entity: string): number {
  return config.traffic_config.routes.find((one) => one.served_entity_name === entity)?.traffic_percentage ?? 0;
}

export function Endpoints({ found, changed }: { found: EndpointInfo[]; changed: () => void }) {
  if (!found.length) return <p class="note">There are no endpoints.</p>;
  return (
    <>
      <Table caption="Endpoints" head={["Endpoint", "State", "Version", "Served models and their traffic", "Rollout", "Payload log"]}>
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
            <td>{config === undefined ? "–" : <Traffic config={config} />}</td>
            <td>
              <Rollout endpoint={name} state={state} config={config} pending={pending} />
            </td>
            <td>
              {config !== undefined && (
                <PayloadLogSwitch
                  endpoint={name}
                  config={config}
                  busy={state.config_update === "IN_PROGRESS"}
                  changed={changed}
                />
              )}
            </td>
          </tr>
        ))}
      </Table>
      {found.map(
        ({ name, state, config }) =>
          config !== undefined &&
          sharersOf(config).length > 1 && (
            <TrafficEditor
              key={`${name} ${config.config_version}`}
              endpoint={name}
              config={config}
              busy={state.config_update === "IN_PROGRESS"}
              changed={changed}
            />
          ),
      )}
    </>
  );
}

function Traffic({ config }: { config: ConfigInfo }) {
  return (
    <ul class="plain">
      {config.served_entities.map((entity) => (
        <li key={entity.name} dir="auto">
          {entity.name}: {roleOf(config, entity)}
          {entity.entity_name !== entity.name && ` (${[entity.entity_name, entity.entity_version].filter(Boolean).join(" ")})`}
        </li>
      ))}
    </ul>
  );
}

/** Return what a served model gets of an endpoint's requests. */
function roleOf(config: ConfigInfo, { name, shadow, canary_of: original, follow_alias: follows }: ServedEntityInfo): string {
  if (shadow !== undefined) return `shadow, gets copies of ${(100 * shadow.sample).toLocaleString()} % of the requests`;
  const share = `${shareOf(config, name)} %`;
  if (original !== undefined) return `${share}, canary of ${original}`;
  return follows ? `${share}, follows its alias` : share;
}

interface RolloutProps {
  endpoint: string;
  state: EndpointInfo["state"];
  config: ConfigInfo | undefined;
  pending: ConfigInfo | undefined;
}

function Rollout({ endpoint, state, config, pending }: RolloutProps) {
  const [log, show] = useState<{ entity: string; text: string } | null>(null);
  const shown = pending ?? config;
  const read = async (entity: string) => {
    const place = `api/2.0/serving-endpoints/${encodeURIComponent(endpoint)}/served-models/${encodeURIComponent(entity)}`;
    try {
      const found = (await (await call(`${place}/build-logs`)).json()) as EngineLogs;
      show({ entity, text: found.logs.trim() || "The log is empty." });
    } catch (error) {
      show({ entity, text: messageOf(error) });
    }
  };
  return (
    <>
      {pending !== undefined && (
        <div class="rollout">
          <label for={`rollout-${endpoint}`}>
            Loading version {pending.config_version}, {duration(pending.start_time)}
          </label>
          <progress id={`rollout-${endpoint}`} />
          <Traffic config={pending} />
        </div>
      )}
      {state.message && (
        <p class={state.config_update === "UPDATE_FAILED" ? "error" : "note"} dir="auto">
          {state.message}
        </p>
      )}
      {(shown?.served_entities ?? []).map(({ name }) => (
        <button key={name} type="button" aria-label={`Log of the start of ${name}`} onClick={() => void read(name)}>
          Start log
        </button>
      ))}
      {log && (
        <Dialog title={`How ${log.entity} started`} close={() => show(null)}>
          <pre tabIndex={0} role="region" aria-label="Log">
            {log.text}
          </pre>
        </Dialog>
      )}
    </>
  );
}

function duration(since: number | undefined): string {
  if (since === undefined) return "just begun";
  const seconds = Math.max(0, Math.round((Date.now() - since) / 1000));
  return seconds < 120 ? `for ${seconds} s` : `for ${Math.round(seconds / 60)} min`;
}
