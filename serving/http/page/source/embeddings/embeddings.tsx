/** Embeddings: how similar texts are to each other, as a map that is a table. */

import { useState } from "preact/hooks";

import { call, messageOf } from "../api";
import type { EmbeddingList } from "../api_types";
import { namesOf } from "../models";
import { say } from "../status";

const MAX_TEXTS = 40;

interface Result {
  texts: string[];
  similar: number[][];
  tokens: number;
  dimensions: number;
}

/** Return the cosine of each pair. */
function cosines(vectors: number[][]): number[][] {
  const dot = (a: number[], b: number[]) => a.reduce((sum, one, place) => sum + one * (b[place] ?? 0), 0);
  const lengths = vectors.map((one) => Math.sqrt(dot(one, one)) || 1);
  return vectors.map((one, row) => vectors.map((other, at) => dot(one, other) / (lengths[row] as number) / (lengths[at] as number)));
}

export function Embeddings() {
  const names = namesOf("embeddings");
  const [chosen, choose] = useState("");
  const [text, setText] = useState("");
  const [result, setResult] = useState<Result | null>(null);
  const [problem, setProblem] = useState("");
  const [running, setRunning] = useState(false);
  const model = names.includes(chosen) ? chosen : (names[0] ?? "");
  const texts = text.split("\n").map((one) => one.trim()).filter(Boolean);
  const compare = async () => {
    setRunning(true);
    try {
      if (texts.length < 2) throw new Error("Write two texts or more, one a line.");
      if (texts.length > MAX_TEXTS) throw new Error(`The map has at most ${MAX_TEXTS} texts; these are ${texts.length}.`);
      const response = await call("v1/embeddings", { method: "POST", body: { model, input: texts } });
      const found = (await response.json()) as EmbeddingList;
      const vectors = found.data.map((one) => one.embedding as number[]); // floats unless base64 is asked for
      const tokens = found.usage.prompt_tokens;
      setResult({ texts, similar: cosines(vectors), tokens, dimensions: vectors[0]?.length ?? 0 });
      setProblem("");
      say(`The similarity of ${texts.length} texts is shown.`);
    } catch (error) {
      setProblem(messageOf(error));
    }
    setRunning(false);
  };
  return (
    <div class="page">
      <h1>Embeddings</h1>
      <form
        class="embed"
        onSubmit={(event) => {
          event.preventDefault();
          void compare();
        }}
      >
        <label for="embedding-model">Model</label>
        <select id="embedding-model" value={model} onChange={(event) => choose(event.currentTarget.value)}>
          {names.map((name) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
        <label for="texts">Texts, one a line</label>
        <textarea id="texts" rows={6} dir="auto" value={text} onInput={(event) => setText(event.currentTarget.value)} />
        <button type="submit" class="primary" disabled={running || !names.length}>
          Compare
        </button>
      </form>
      {problem && <p class="error">{problem}</p>}
      {result && <Similarity result={result} />}
    </div>
  );
}

function Similarity({ result: { texts, similar, tokens, dimensions } }: { result: Result }) {
  const off = similar.flatMap((row, at) => row.filter((_, place) => place !== at));
  const [low, high] = [Math.min(...off), Math.max(...off)];
  return (
    <>
      <p class="note">
        {dimensions} dimensions, {tokens} tokens. Each cell is the cosine of two texts; the colours go from the least similar
        pair to the most similar one.
      </p>
      <div class="scroll" tabIndex={0} role="region" aria-label="Similarity of the texts">
        <table class="similarity">
          <caption class="visually-hidden">Similarity of the texts</caption>
          <thead>
            <tr>
              <th scope="col">Text</th>
              {texts.map((_, place) => (
                <th key={place} scope="col">
                  {place + 1}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {texts.map((one, row) => (
              <tr key={row}>
                <th scope="row" dir="auto">
                  {row + 1}. {one}
                </th>
                {(similar[row] ?? []).map((value, place) => (
                  <td key={place} class={row === place ? "same" : `warm-${step(value, low, high)}`}>
                    {value.toFixed(3)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

/** Return one of five steps of the colours. */
function step(value: number, low: number, high: number): number {
  return high > low ? Math.min(4, Math.floor((5 * (value - low)) / (high - low))) : 2;
}
