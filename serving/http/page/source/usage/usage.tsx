/** What the key used, what is left of its limits, and its keys. */

import { useEffect } from "preact/hooks";

import { account, loadAccount } from "../account";
import type { LimitLeftInfo } from "../api_types";
import { beyond, percentages } from "../limits";
import { Table } from "../loading";
import { UsageReport } from "./report";

const LEFT_HEAD = ["Limit of", "On", "Allowed", "Used", "Left", "Requests beyond it are", "Webhooks are told at", "All of it free"];

export function Usage() {
  useEffect(() => void loadAccount(), []);
  return (
    <div class="page">
      <h1>My usage</h1>
      <UsageReport groups={["endpoint", "adapter", "entity", "model_version", "key_id", "tenant"]} />
      <Left />
      <OwnKeys />
    </div>
  );
}

function Left() {
  const found = account.value?.limits ?? [];
  return (
    <section>
      <h2>What is left</h2>
      {found.length ? (
        <Table caption="What is left of each limit" head={LEFT_HEAD}>
          {found.map((one) => (
            <tr key={`${one.scope} ${one.endpoint} ${one.kind}`}>
              <th scope="row" dir="auto">
                {one.endpoint === null ? `the ${one.scope}` : one.endpoint}
              </th>
              <td>{one.unit}</td>
              <td>{one.allowed}</td>
              <td>{one.used}</td>
              <td>{left(one)}</td>
              <td>{beyond(one.soft)}</td>
              <td>{percentages(one.alert_at)}</td>
              <td>{resets(one.reset_seconds)}</td>
            </tr>
          ))}
        </Table>
      ) : (
        <p class="note">No limits are set for this key.</p>
      )}
    </section>
  );
}

function left({ remaining, used, allowed }: LimitLeftInfo): string {
  return Number(used) > Number(allowed) ? `${remaining}: exceeded` : String(remaining);
}

function resets(seconds: number | null): string {
  if (seconds === null) return "never: it is spent for good";
  if (seconds === 0) return "now";
  const at = new Date(Date.now() + seconds * 1000).toISOString().slice(0, 16).replace("T", " ");
  return seconds < 3600 ? `in ${seconds} s` : `at ${at} (UTC)`;
}

function OwnKeys() {
  const keys = account.value?.keys ?? [];
  if (!keys.length) return null;
  return (
    <section>
      <h2>Keys</h2>
      <Table caption="My keys" head={["Key", "Name", "Scopes", "May use", "Until", "State"]}>
        {keys.map((one) => (
          <tr key={one.key_id}>
            <th scope="row">
              <code>{one.key_id}</code>
              {one.key_id === account.value?.key_id && " (this one)"}
            </th>
            <td dir="auto">{one.name}</td>
            <td>{one.scopes.join(", ")}</td>
            <td dir="auto">{one.endpoints?.join(", ") ?? "everything"}</td>
            <td>
              {one.expires_ms === null ? "no end" : new Date(one.expires_ms).toISOString().slice(0, 16).replace("T", " ")}
            </td>
            <td>{one.state}</td>
          </tr>
        ))}
      </Table>
    </section>
  );
}
