/** Limits of keys, tenants, endpoints and end users: list, set, change, remove. */

import { useState } from "preact/hooks";

import { call, messageOf } from "../api";
import type { ChangedLimits, LimitInfo, LimitList } from "../api_types";
import { beyond, percentages } from "../limits";
import { Shown, Table, useLoaded } from "../loading";
import { say } from "../status";
import { EntryForm, type Filling, type Given } from "./entry_form";

const SCOPES = ["key", "tenant", "endpoint", "user", "key_user", "tenant_user", "endpoint_user"];
const KINDS = ["itpm", "otpm", "qpm", "qph", "in_flight", "budget", "budget_day", "budget_month"];
const BEYOND = [beyond(false), beyond(true)];
const NOBODY = "none"; // entered for no shares at all

/** Return the shares at which webhooks are told, as the limit itself or else the server has them. */
function alerts({ scope, kind, soft, alert_at: shares }: LimitInfo): string {
  if (kind === "in_flight") return "–";
  const byServer = shares === null && kind.startsWith("budget") && !scope.endsWith("_user");
  const own = [...(shares ?? []), ...(soft && !shares?.includes(1) ? [1] : [])].toSorted((one, other) => one - other);
  if (!byServer) return percentages(own);
  return soft ? "the server's shares, and 100 %" : "the server's shares";
}

/** Return a number as it was entered; what is none stays a text, which the server refuses in its words. */
function asNumber(text: string): number | string {
  return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
}

/** Return the shares that were entered; null leaves them to the server. */
function asShares(text: string): (number | string)[] | null {
  if (text === "") return null;
  return text === NOBODY ? [] : text.split(",").map((one) => asNumber(one.trim()));
}

/** Return what the form has for a limit that is there. */
function entered(one: LimitInfo): Given {
  const shares = one.alert_at?.length === 0 ? NOBODY : (one.alert_at?.join(", ") ?? "");
  const { scope, subject, end_user, kind } = one;
  return { scope, subject, end_user, kind, value: String(one.value), beyond: beyond(one.soft), alert_at: shares };
}

export function Limits() {
  const loaded = useLoaded<LimitList>("api/2.0/limits");
  const [problem, setProblem] = useState("");
  const [filling, fill] = useState<Filling | null>(null);
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
  const save = async ({ scope = "", subject = "", end_user = "", kind = "", value = "", ...rest }: Given) => {
    const amount = kind.startsWith("budget") ? value : asNumber(value);
    const shares = asShares(rest["alert_at"] ?? "");
    const limit = { value: amount, soft: rest["beyond"] === beyond(true), ...(shares !== null && { alert_at: shares }) };
    const body = { scope, subject, limits: { [kind]: limit }, ...(end_user && { end_user }) };
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
            <Table caption="Limits" head={["Scope", "Of", "Limit", "Value", "Beyond it", "Webhooks are told at", "Action"]}>
              {limits.map((one) => {
                const named = `the limit ${one.kind} of ${one.subject} ${one.end_user}`.trim();
                return (
                  <tr key={`${one.scope} ${one.subject} ${one.end_user} ${one.kind}`}>
                    <td>{one.scope}</td>
                    <td dir="auto">
                      {one.subject} {one.end_user}
                    </td>
                    <td>{one.unit}</td>
                    <td>{one.value}</td>
                    <td>{beyond(one.soft)}</td>
                    <td>{alerts(one)}</td>
                    <td>
                      <button
                        type="button"
                        aria-label={`Change ${named}`}
                        onClick={() => fill({ values: entered(one), focus: "value" })}
                      >
                        Change
                      </button>
                      <button type="button" aria-label={`Remove ${named}`} onClick={() => void remove(one)}>
                        Remove
                      </button>
                    </td>
                  </tr>
                );
              })}
            </Table>
          ) : (
            <p class="note">No limits are set.</p>
          )}
          {problem && <p class="error">{problem}</p>}
          <EntryForm
            title="Set a limit"
            prefix="limit"
            note={`Shares are parts of the limit: 0.5, 0.8 is half and 80 %. "${NOBODY}" tells nobody; an empty field leaves it to the server, which has shares for budgets.`}
            fields={[
              { name: "scope", label: "Scope", options: SCOPES },
              { name: "subject", label: "Of (a key's id, tenant or endpoint)" },
              { name: "end_user", label: "End user (of …_user; empty is each of them)", optional: true },
              { name: "kind", label: "Kind", options: KINDS },
              { name: "value", label: "Value" },
              { name: "beyond", label: "Requests beyond it are", options: BEYOND },
              { name: "alert_at", label: "Tell webhooks at shares", optional: true },
            ]}
            save={save}
            fill={filling}
          />
        </>
      )}
    </Shown>
  );
}
