/** Prices of served models, and the times from which they are in force. */

import { call } from "../api";
import type { ChangedPrice, PriceList } from "../api_types";
import { Shown, Table, useLoaded } from "../loading";
import { say } from "../status";
import { loadAccount } from "../account";
import { EntryForm, type Given } from "./entry_form";

const HEAD = ["Served model", "Since (UTC)", "Prompt tokens", "of them cached", "Answer tokens", "Reserved token/s a minute"];

export function Prices() {
  const loaded = useLoaded<PriceList>("api/2.0/prices");
  const save = async (given: Given) => {
    const body = Object.fromEntries(Object.entries(given).filter(([, value]) => value !== ""));
    const response = await call("api/2.0/prices", { method: "PUT", body });
    say("The price is set.");
    loaded.reload();
    void loadAccount();
    return ((await response.json()) as ChangedPrice).notes;
  };
  return (
    <Shown loaded={loaded}>
      {({ currency, prices }) => (
        <>
          <p class="note">Prices are for a million tokens{currency && `, in ${currency}`}.</p>
          {prices.length ? (
            <Table caption="Prices" head={HEAD}>
              {prices.map((one) => (
                <tr key={`${one.entity} ${one.effective_ms}`}>
                  <th scope="row" dir="auto">
                    {one.entity === "*" ? "every other (*)" : one.entity}
                  </th>
                  <td>{new Date(one.effective_ms).toISOString().slice(0, 16).replace("T", " ")}</td>
                  <td>{one.input}</td>
                  <td>{one.cached}</td>
                  <td>{one.output}</td>
                  <td>{one.unit_minute}</td>
                </tr>
              ))}
            </Table>
          ) : (
            <p class="note">No prices are set: everything is free.</p>
          )}
          <EntryForm
            title="Set a price from now on"
            prefix="price"
            fields={[
              { name: "entity", label: "Served model (* for every other)" },
              { name: "input", label: "Prompt tokens" },
              { name: "cached", label: "Cached tokens (empty: as prompt)", optional: true },
              { name: "output", label: "Answer tokens" },
            ]}
            save={save}
          />
        </>
      )}
    </Shown>
  );
}
