/** One answer: its text or heat map, its state, its numbers and what can be done with it. */

import type { Signal } from "@preact/signals";

import { regenerate, stop, tokensPerSecond } from "./chat";
import type { Answer } from "./conversation";
import { HeatMap } from "./heat_map";

interface Props {
  answer: Signal<Answer>;
  column: number;
  isLast: boolean;
  showCode: () => void;
}

export function AnswerView({ answer, column, isLast, showCode }: Props) {
  const now = answer.value;
  const running = now.state === "running";
  const what = `of ${now.model}, column ${column + 1}`;
  return (
    <article class="answer" aria-label={`Answer ${what}`} aria-busy={running}>
      <h3 dir="auto">{now.model}</h3>
      {now.reasoning && (
        <details>
          <summary>Reasoning</summary>
          <p class="text" dir="auto">
            {now.reasoning}
          </p>
        </details>
      )}
      {now.tokens.length > 0 ? (
        <HeatMap tokens={now.tokens} label={`Tokens of the answer ${what}`} />
      ) : (
        <p class="text" dir="auto">
          {now.text}
          {running && <span class="cursor" aria-hidden="true" />}
        </p>
      )}
      {now.state === "failed" && <p class="error">{now.error}</p>}
      {now.state === "stopped" && <p class="note">Stopped.</p>}
      {now.finishReason === "length" && <p class="note">Cut at the limit of tokens.</p>}
      <Numbers answer={now} />
      <div class="actions">
        {running ? (
          <button type="button" onClick={() => stop(answer)} aria-label={`Stop the answer ${what}`}>
            Stop
          </button>
        ) : (
          <>
            {isLast && (
              <button type="button" onClick={() => regenerate(column)} aria-label={`Regenerate the answer ${what}`}>
                Regenerate
              </button>
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

function Numbers({ answer }: { answer: Answer }) {
  const speed = tokensPerSecond(answer);
  const facts: [string, string][] = [];
  if (answer.promptTokens !== null) facts.push(["Prompt", `${answer.promptTokens} tokens`]);
  if (answer.completionTokens !== null) facts.push(["Answer", `${answer.completionTokens} tokens`]);
  if (answer.firstTokenMs !== null) facts.push(["First token", `${Math.round(answer.firstTokenMs)} ms`]);
  if (speed !== null) facts.push(["Speed", `${speed.toFixed(1)} tokens/s`]);
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
