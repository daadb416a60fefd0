/** The tokens of an answer, coloured by their probability. Arrow keys move from token to token. */

import { useId, useState } from "preact/hooks";

import { Windowed } from "../windowed";
import type { TokenView } from "./conversation";

const BLOCK = 100; // tokens
const BLOCK_HEIGHT = 120; // pixels, until it was seen
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
  const blocks = Array.from({ length: Math.ceil(tokens.length / BLOCK) }, (_, number) =>
    tokens.slice(number * BLOCK, (number + 1) * BLOCK),
  );
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
        onClick={(event) => {
          const place = /-(\d+)$/.exec((event.target as Element).id)?.[1];
          if (place !== undefined) choose(Number(place));
        }}
        onKeyDown={(event) => {
          const target = moves[event.key];
          if (target === undefined) return;
          event.preventDefault();
          choose(Math.max(0, Math.min(tokens.length - 1, target)));
        }}
      >
        {blocks.map((block, number) => {
          const first = number * BLOCK;
          const tokensOf = () =>
            block.map((one, place) => (
              <span
                key={place}
                id={`${id}-${first + place}`}
                role="option"
                aria-selected={first + place === chosen}
                // only the chosen one is read aloud: a name for each of thousands is what scrolling would wait for
                aria-label={first + place === chosen ? `${JSON.stringify(one.text)}, ${percent(one.logprob)}` : undefined}
                class={`token heat-${level(one.logprob)}`}
              >
                {one.text}
              </span>
            ));
          if (blocks.length === 1) return tokensOf();
          const hasChosen = chosen >= first && chosen < first + BLOCK; // aria-activedescendant names an element
          return (
            <Windowed key={number} class="token-block" estimate={BLOCK_HEIGHT} cost={BLOCK} always={hasChosen}>
              {tokensOf}
            </Windowed>
          );
        })}
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
