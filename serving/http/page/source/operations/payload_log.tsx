/** The payload log of an endpoint, turned on and off after a confirmation, and the texts of one request. */

import { Fragment } from "preact";
import { useState } from "preact/hooks";

import { call, messageOf } from "../api";
import type { ConfigInfo, PayloadPage } from "../api_types";
import { Dialog } from "../dialog";
import { Shown, useLoaded } from "../loading";
import { say } from "../status";
import { EndedCanary, updateOf } from "./traffic";

interface Props {
  endpoint: string;
  config: ConfigInfo;
  busy: boolean;
  changed: () => void;
}

export function PayloadLogSwitch({ endpoint, config, busy, changed }: Props) {
  const [asked, ask] = useState(false);
  const [problem, setProblem] = useState("");
  const settings = config.payload_log;
  const verb = settings ? "off" : "on";
  const apply = async () => {
    try {
      const path = `api/2.0/serving-endpoints/${encodeURIComponent(endpoint)}/config`;
      const body = { ...updateOf(config), payload_log: settings ? null : {} };
      await call(path, { method: "PUT", body });
      say(`The payload log of ${endpoint} is being turned ${verb}.`);
      setProblem("");
      changed();
    } catch (error) {
      setProblem(messageOf(error));
    }
    ask(false);
  };
  return (
    <>
      <p>{settings ? `on, ${(100 * settings.sample).toLocaleString()} % of the requests` : "off"}</p>
      {problem && <p class="error">{problem}</p>}
      <button
        type="button"
        disabled={busy}
        aria-label={`Turn the payload log of ${endpoint} ${verb}`}
        onClick={() => ask(true)}
      >
        Turn {verb}
      </button>
      {asked && (
        <Dialog
          title={`Turn the payload log of ${endpoint} ${verb}?`}
          close={() => ask(false)}
          closeLabel="Cancel"
          actions={
            <button type="button" class="primary" onClick={() => void apply()}>
              Turn it {verb}
            </button>
          }
        >
          <EndedCanary config={config} />
          <p>
            {settings
              ? "No more texts are kept. Those that are there stay until their age, or until they are deleted."
              : "From now on, the texts of requests and answers are kept in the database for a week, of every tenant. Keys with the scope manage can read them."}
          </p>
        </Dialog>
      )}
    </>
  );
}

const WHY: Record<string, string> = {
  MAX_REQUEST_SIZE_EXCEEDED: "The request was too long for the log.",
  MAX_RESPONSE_SIZE_EXCEEDED: "The answer was too long for the log.",
  REQUEST_NOT_JSON: "The request was not JSON.",
  REDACTION_FAILED: "A text could not be redacted, and was not kept.",
};

export function PayloadDialog({ endpoint, request, close }: { endpoint: string; request: string; close: () => void }) {
  const path = `api/2.0/serving-endpoints/${encodeURIComponent(endpoint)}/payloads`;
  const loaded = useLoaded<PayloadPage>(`${path}?request_id=${encodeURIComponent(request)}`);
  return (
    <Dialog title={`Texts of request ${request}`} close={close}>
      <Shown loaded={loaded}>
        {({ payloads }) => {
          const found = payloads.find((one) => !one.shadow);
          const copies = payloads.filter((one) => one.shadow);
          return found ? (
            <>
              <Text title="Request" text={found.request} />
              <Text title="Answer" text={found.response} />
              <Codes codes={found.codes} />
              {copies.map((one) => (
                <Fragment key={one.entity}>
                  <Text title={`Answer of the shadow ${one.entity} to a copy, status ${one.status_code}`} text={one.response} />
                  <Codes codes={one.codes} />
                </Fragment>
              ))}
            </>
          ) : (
            <p class="note">The texts have been deleted.</p>
          );
        }}
      </Shown>
    </Dialog>
  );
}

function Codes({ codes }: { codes: string[] }) {
  return (
    <>
      {codes.map((code) => (
        <p key={code} class="note">
          {WHY[code] ?? code}
        </p>
      ))}
    </>
  );
}

function Text({ title, text }: { title: string; text: string | null }) {
  return (
    <>
      <h3>{title}</h3>
      {text === null ? (
        <p class="note">None.</p>
      ) : (
        <pre class="texts" tabIndex={0} role="region" aria-label={title} dir="auto">
          {pretty(text)}
        </pre>
      )}
    </>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
