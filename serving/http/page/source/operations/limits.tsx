/** Limits of keys, tenants, endpoints and end users: list, set, remove. */

import { useState } from "preact/hooks";

import { call, messageOf } from "../api";
import type { ChangedLimits, LimitInfo, LimitList } from "../api_types";
import { Shown, Table, useLoaded } from "../loading";
import { say } from "../status";
import { EntryForm, type Given } from "./entry_form";

const SCOPES = ["key", "tenant", "endpoint", "user", "key_user", "tenant_user", "endpoint_user"];
const KINDS = ["itpm", "otpm", "qpm", "qph", "in_flight", "budget", "budget_day", "budget_month"];

export function Limits() {
  const loaded = useLoaded<LimitList>("api/2.0/limits");
  const [problem, setProblem] = useState("");
  const remove = async ({ scope, subject, end_user, kind }: LimitInfo) => {
    try {
      const named = { scope, subject, kind, ...(end_user && { end_user }) };
      await call(`api/2.0/limits?${new URLSearchParams(named).toString()}`, { method: "DELETE" });
      say("The limit is removed.");
      setProblem("");
      loaded.reload();
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  const save = async ({ scope = "", subject = "", end_user = "", kind = "", value = "" }: Given) => {
    const amount = kind.startsWith("budget") ? value : Number(value);
    const body = { scope, subject, limits: { [kind]: amount }, ...(end_user && { end_user }) };
    const response = await call("api/2.0/limits", { method: "PUT", body });
    say("The limit is set.");
    loaded.reload();
    return ((await response.json()) as ChangedLimits).notes;
  };
  return (
    <Shown loaded={loaded}>
      {({ limits }) => (
        <>
          {limits.length ? (
            <Table caption="Limits" head={["Scope", "Of", "Limit", "Value", "Action"]}>
              {limits.map((one) => (
                <tr key={`${one.scope} ${one.subject} ${one.end_user} ${one.kind}`}>
                  <td>{one.scope}</td>
                  <td dir="auto">
                    {one.subject} {one.end_user}
                  </td>
                  <td>{one.unit}</td>
                  <td>{one.value}</td>
                  <td>
                    <button
                      type="button"
                      aria-label={`Remove the limit ${one.kind} of ${one.subject} ${one.end_user}`.trim()}
                      onClick={() => void remove(one)}
                    >
                      Remove
                    </button>
                  </td>
                </tr>
              ))}
            </Table>
          ) : (
            <p class="note">No limits are set.</p>
          )}
          {problem && <p class="error">{problem}</p>}
          <EntryForm
            title="Set a limit"
            prefix="limit"
            fields={[
              { name: "scope", label: "Scope", options: SCOPES },
              { name: "subject", label: "Of (a key's id, tenant or endpoint)" },
              { name: "end_user", label: "End user (of …_user; empty is each of them)", optional: true },
              { name: "kind", label: "Kind", options: KINDS },
              { name: "value", label: "Value" },
            ]}
            save={save}
          />
        </>
      )}
    </Shown>
  );
}
