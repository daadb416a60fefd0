/** A column's part of a turn: its answers, their numbers and cost, their tool calls, and what can be done with them. */

import type { Signal } from "@preact/signals";

import { account, costOf, isFree, money, priceOf } from "../account";
import { endpointOf, isOneOfSeveral } from "../models";
import { regenerate, sendResults, stop, tokensPerSecond } from "./chat";
import { type Answer, type Choice, current, save } from "./conversation";
import { HeatMap } from "./heat_map";
import { TextView } from "./text_view";

interface Props {
  steps: Signal<Answer>[];
  column: number;
  isLast: boolean;
  showCode: (step: number) => void;
}

export function ColumnAnswers({ steps, column, isLast, showCode }: Props) {
  return (
    <div class="steps">
      {steps.map((answer, step) => (
        <AnswerView
          key={step}
          answer={answer}
          column={column}
          isLast={isLast && step === steps.length - 1}
          showCode={() => showCode(step)}
        />
      ))}
    </div>
  );
}

interface AnswerProps {
  answer: Signal<Answer>;
  column: number;
  isLast: boolean;
  showCode: () => void;
}

function AnswerView({ answer, column, isLast, showCode }: AnswerProps) {
  const now = answer.value;
  const running = now.state === "running";
  const what = `of ${now.model}, column ${column + 1}`;
  const change = (changed: Partial<Answer>) => {
    answer.value = { ...answer.value, ...changed };
    save();
  };
  const choices = now.choices.length ? now.choices : [null];
  return (
    <article class="answer" aria-label={`Answer ${what}`} aria-busy={running}>
      <h3 dir="auto">
        {now.model}
        {now.servedModel !== now.model && isOneOfSeveral(now.servedModel) && <span class="note"> ({now.servedModel})</span>}
      </h3>
      {choices.map((choice, index) => (
        <ChoiceView
          key={index}
          choice={choice}
          running={running}
          label={choices.length > 1 ? `${index + 1} ${what}` : what}
          picked={choices.length > 1 ? { now: now.chosen === index, pick: () => change({ chosen: index }) } : null}
          group={`chosen ${what}`}
        />
      ))}
      {now.state === "failed" && <p class="error">{now.error}</p>}
      {now.state === "stopped" && <p class="note">Stopped.</p>}
      {isLast && !running && now.state !== "failed" && <Calls answer={answer} column={column} what={what} />}
      <Numbers answer={now} />
      <div class="actions">
        {running ? (
          <button type="button" onClick={() => stop(answer)} aria-label={`Stop the answer ${what}`}>
            Stop
          </button>
        ) : (
          <>
            {isLast && (
              <>
                <button
                  type="button"
                  onClick={() => regenerate(column, now.seed)}
                  aria-label={`Regenerate the answer ${what}`}
                >
                  Regenerate
                </button>
                <button
                  type="button"
                  onClick={() => regenerate(column, null)}
                  aria-label={`Regenerate with another seed the answer ${what}`}
                >
                  Another seed
                </button>
              </>
            )}
            <button type="button" onClick={showCode} aria-label={`Get code for the answer ${what}`}>
              Get code
            </button>
          </>
        )}
      </div>
    </article>
  );
}

interface ChoiceProps {
  choice: Choice | null;
  running: boolean;
  label: string;
  picked: { now: boolean; pick: () => void } | null;
  group: string;
}

function ChoiceView({ choice, running, label, picked, group }: ChoiceProps) {
  const shownCalls = choice?.calls ?? [];
  return (
    <div class={picked ? "choice" : undefined}>
      {picked && (
        <label class="check">
          <input type="radio" name={group} checked={picked.now} onChange={picked.pick} />
          Go on with answer {label.split(" ")[0]}
        </label>
      )}
      {choice?.reasoning && (
        <details>
          <summary>Reasoning</summary>
          <TextView text={choice.reasoning} />
        </details>
      )}
      {choice !== null && choice.tokens.length > 0 ? (
        <HeatMap tokens={choice.tokens} label={`Tokens of the answer ${label}`} />
      ) : (
        <TextView text={choice?.text ?? ""} running={running} />
      )}
      {shownCalls.map((call, index) => (
        <div key={index} class="call">
          <p>
            Calls <code>{call.name}</code>
          </p>
          <pre tabIndex={0} role="region" aria-label={`Arguments of call ${index + 1}`}>
            {pretty(call.arguments)}
          </pre>
          {call.result && (
            <>
              <p>Result</p>
              <pre tabIndex={0} role="region" aria-label={`Result of call ${index + 1}`}>
                {call.result}
              </pre>
            </>
          )}
        </div>
      ))}
      {choice?.finishReason === "length" && <p class="note">Cut at the limit of tokens.</p>}
    </div>
  );
}

function pretty(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still streaming, or not JSON
  }
}

/** The results of an answer's tool calls, entered by hand. */
function Calls({ answer, column, what }: { answer: Signal<Answer>; column: number; what: string }) {
  const now = answer.value;
  const calls = now.choices[now.chosen]?.calls ?? [];
  if (!calls.length) return null;
  const enter = (place: number, result: string) => {
    const choices = now.choices.map((choice, at) =>
      at === now.chosen ? { ...choice, calls: calls.map((one, n) => (n === place ? { ...one, result } : one)) } : choice,
    );
    answer.value = { ...now, choices };
  };
  return (
    <form
      class="results"
      aria-label={`Results for the answer ${what}`}
      onSubmit={(event) => {
        event.preventDefault();
        sendResults(column);
      }}
    >
      {calls.map((call, place) => (
        <label key={place}>
          Result of {call.name}
          <textarea
            rows={2}
            required
            value={call.result}
            onInput={(event) => enter(place, event.currentTarget.value)}
          />
        </label>
      ))}
      <button type="submit" class="primary">
        Send results
      </button>
    </form>
  );
}

function Numbers({ answer }: { answer: Answer }) {
  const speed = tokensPerSecond(answer);
  const cost = costShown(answer);
  const facts: [string, string][] = [];
  if (answer.promptTokens !== null) facts.push(["Prompt", `${answer.promptTokens} tokens`]);
  if (answer.completionTokens !== null) facts.push(["Answer", `${answer.completionTokens} tokens`]);
  if (answer.firstTokenMs !== null) facts.push(["First token", `${Math.round(answer.firstTokenMs)} ms`]);
  if (speed !== null) facts.push(["Speed", `${speed.toFixed(1)} tokens/s`]);
  if (cost !== null) facts.push(["Cost", money(cost, account.value?.currency ?? "")]);
  if (answer.seed !== null && answer.state !== "running") facts.push(["Seed", String(answer.seed)]);
  if (!facts.length) return null;
  return (
    <dl class="numbers">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Return the cost so far; null if nothing has been counted, the price is not known, or nothing costs anything. */
function costShown(answer: Answer): number | null {
  if (answer.promptTokens === null || answer.completionTokens === null) return null;
  const price = priceOf(endpointOf(answer.model), answer.servedModel);
  if (price === null || isFree(price)) return null;
  return costOf(price, answer.promptTokens, answer.cachedTokens, answer.completionTokens);
}

/** The cost of the whole conversation, as it grows. */
export function TotalCost() {
  const costs = current.value.turns
    .flatMap((turn) => turn.answers.flat())
    .map((answer) => costShown(answer.value))
    .filter((cost) => cost !== null);
  if (!costs.length) return null;
  const total = costs.reduce((sum, cost) => sum + cost, 0);
  return (
    <p class="note total-cost">
      Cost of this conversation, at today's prices: <strong>{money(total, account.value?.currency ?? "")}</strong>
    </p>
  );
}
