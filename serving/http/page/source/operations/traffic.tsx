/** The traffic split of an endpoint, changed by dragging, arrow keys or numbers; nothing is sent before a confirmation. */

import { useState } from "preact/hooks";

import { call, messageOf } from "../api";
import type { ConfigInfo, ServedEntityInfo } from "../api_types";
import { Dialog } from "../dialog";
import { say } from "../status";
import { shareOf } from "./endpoints";

interface Props {
  endpoint: string;
  config: ConfigInfo;
  busy: boolean;
  changed: () => void;
}

/** Return the shares after one was set: the others keep their proportions, and all sum to 100. */
export function withShare(shares: number[], place: number, value: number): number[] {
  const set = Math.max(0, Math.min(100, Math.round(Number.isFinite(value) ? value : 0)));
  const others = shares.reduce((sum, one, at) => (at === place ? sum : sum + one), 0);
  const exact = shares.map((one, at) => {
    if (at === place) return set;
    return ((100 - set) * (others ? one / others : 1 / (shares.length - 1))) as number;
  });
  const whole = exact.map(Math.floor);
  const order = exact.map((_, at) => at).toSorted((a, b) => (exact[b] as number) % 1 - ((exact[a] as number) % 1));
  for (const at of order) {
    if (whole.reduce((sum, one) => sum + one, 0) >= 100) break;
    whole[at] = (whole[at] as number) + 1;
  }
  return whole;
}

/** Return the names of the served models that share the traffic of requests: not shadows, and no running canary. */
export function sharersOf(config: ConfigInfo): string[] {
  return config.served_entities.filter((one) => one.shadow === undefined && one.canary_of === undefined).map((one) => one.name);
}

/** Return the share of a served model with that of its canary, which an update ends. */
function shareWithCanary(config: ConfigInfo, name: string): number {
  const canaries = config.served_entities.filter((one) => one.canary_of === name);
  return canaries.reduce((sum, one) => sum + shareOf(config, one.name), shareOf(config, name));
}

export function TrafficEditor({ endpoint, config, busy, changed }: Props) {
  const names = sharersOf(config);
  const before = names.map((name) => shareWithCanary(config, name));
  const [shares, set] = useState(before);
  const [asked, ask] = useState(false);
  const [problem, setProblem] = useState("");
  const same = shares.every((one, place) => one === before[place]);
  const apply = async () => {
    try {
      const path = `api/2.0/serving-endpoints/${encodeURIComponent(endpoint)}/config`;
      await call(path, { method: "PUT", body: configWith(config, shares) });
      say(`The traffic of ${endpoint} is being changed.`);
      setProblem("");
      changed();
    } catch (error) {
      setProblem(messageOf(error));
    }
    ask(false);
  };
  const aliases = config.served_entities.filter((one) => /\D/.test(one.entity_version ?? ""));
  return (
    <fieldset class="traffic">
      <legend dir="auto">Traffic of {endpoint}</legend>
      {names.map((name, place) => (
        <div key={name} class="share">
          <label for={`share-${endpoint}-${place}`} dir="auto">
            {name}
          </label>
          <input
            id={`share-${endpoint}-${place}`}
            type="range"
            min={0}
            max={100}
            value={shares[place]}
            aria-valuetext={`${shares[place]} %`}
            onInput={(event) => set(withShare(shares, place, Number(event.currentTarget.value)))}
          />
          <input
            type="number"
            min={0}
            max={100}
            aria-label={`Percent of ${name}`}
            value={shares[place]}
            onChange={(event) => set(withShare(shares, place, Number(event.currentTarget.value)))}
          />
          <span aria-hidden="true">%</span>
        </div>
      ))}
      {problem && <p class="error">{problem}</p>}
      {busy && <p class="note">An update is running; the next one has to wait for it.</p>}
      <div class="actions">
        <button type="button" class="primary" disabled={same || busy} onClick={() => ask(true)}>
          Change the traffic
        </button>
        <button type="button" disabled={same} onClick={() => set(before)}>
          Reset
        </button>
      </div>
      {asked && (
        <Dialog
          title={`Change the traffic of ${endpoint}?`}
          close={() => ask(false)}
          closeLabel="Cancel"
          actions={
            <button type="button" class="primary" onClick={() => void apply()}>
              Change it
            </button>
          }
        >
          <ul class="plain">
            {names.map((name, place) => (
              <li key={name} dir="auto">
                {name}: {before[place]} % → {shares[place]} %
              </li>
            ))}
          </ul>
          <EndedCanary config={config} />
          {aliases.length > 0 && (
            <p class="note">
              Aliases are read again: {aliases.map((one) => `${one.entity_name} ${one.entity_version}`).join(", ")}.
            </p>
          )}
        </Dialog>
      )}
    </fieldset>
  );
}

/** The effect of an update on the canary that an endpoint has. */
export function EndedCanary({ config }: { config: ConfigInfo }) {
  const canary = config.served_entities.find((one) => one.canary_of !== undefined);
  if (canary === undefined) return null;
  return (
    <p class="note" dir="auto">
      The update ends the canary {canary.name}: its traffic goes back to {canary.canary_of}.
    </p>
  );
}

// what an entity shows beside what an update may set
const SHOWN_ONLY = new Set(["state", "resolved_name", "resolved_version", "content_hash", "request_defaults"]);

/** Return the body of an update that changes the shares and nothing else. */
function configWith(config: ConfigInfo, shares: number[]): object {
  const routes = sharersOf(config).map((name, place) => ({ served_model_name: name, traffic_percentage: shares[place] }));
  return { ...updateOf(config), traffic_config: { ...config.traffic_config, routes } };
}

/** Return the body of an update that changes nothing. */
export function updateOf(config: ConfigInfo): object {
  const { config_version: _, start_time: __, ...rest } = config;
  const { served_models: ___, ...kept } = rest;
  const entity = (one: ServedEntityInfo) => Object.fromEntries(Object.entries(one).filter(([name]) => !SHOWN_ONLY.has(name)));
  return { ...kept, served_entities: config.served_entities.map(entity) };
}
