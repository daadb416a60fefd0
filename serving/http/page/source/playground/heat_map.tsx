/** The tokens of an answer, coloured by their probability. Arrow keys move from token to token. */

import { useId, useState } from "preact/hooks";

import type { TokenView } from "./conversation";

const BOUNDS = [0.9, 0.6, 0.3, 0.1]; // lower bounds of the levels 0 to 3; 4 is below

function level(logprob: number): number {
  const found = BOUNDS.findIndex((bound) => Math.exp(logprob) >= bound);
  return found < 0 ? BOUNDS.length : found;
}

function percent(logprob: number): string {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

export function HeatMap({ tokens, label }: { tokens: TokenView[]; label: string }) {
  const id = useId();
  const [chosen, choose] = useState(0);
  const token = tokens[Math.min(chosen, tokens.length - 1)];
  const moves: Record<string, number> = {
    ArrowLeft: chosen - 1,
    ArrowRight: chosen + 1,
    Home: 0,
    End: tokens.length - 1,
  };
  return (
    <div class="heat-map">
      <div
        role="listbox"
        tabIndex={0}
        dir="auto"
        aria-label={label}
        aria-orientation="horizontal"
        aria-activedescendant={token && `${id}-${chosen}`}
        onKeyDown={(event) => {
          const target = moves[event.key];
          if (target === undefined) return;
          event.preventDefault();
          choose(Math.max(0, Math.min(tokens.length - 1, target)));
        }}
      >
        {tokens.map((one, index) => (
          <span
            key={index}
            id={`${id}-${index}`}
            role="option"
            aria-selected={index === chosen}
            aria-label={`${JSON.stringify(one.text)}, ${percent(one.logprob)}`}
            class={`token heat-${level(one.logprob)}`}
            onClick={() => choose(index)}
          >
            {one.text}
          </span>
        ))}
      </div>
      {token && (
        <dl class="token-facts" dir="auto">
          {[{ text: token.text, logprob: token.logprob }, ...token.top.filter((one) => one.text !== token.text)].map(
            (one, index) => (
              <div key={index}>
                <dt>
                  <code>{JSON.stringify(one.text)}</code>
                </dt>
                <dd>{percent(one.logprob)}</dd>
              </div>
            ),
          )}
        </dl>
      )}
      <p class="legend">
        Probability of a token:{" "}
        {["90 % or more", "60 % or more", "30 % or more", "10 % or more", "less"].map((text, index) => (
          <span key={text} class={`token heat-${index}`}>
            {text}
          </span>
        ))}
      </p>
    </div>
  );
}
