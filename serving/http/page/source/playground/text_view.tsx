/** The text of an answer in blocks, so that a token lays out only the last one, and blocks out of sight none. */

const BLOCK = 4000; // characters

/** Return `text` in pieces that end at a line's end if there is one near, else anywhere between two characters. */
export function blocksOf(text: string): string[] {
  const blocks: string[] = [];
  for (let start = 0; start < text.length; ) {
    let end = Math.min(text.length, start + BLOCK);
    if (end < text.length) {
      const line = text.lastIndexOf("\n", end);
      if (line > start + BLOCK / 2) end = line + 1;
      else if (/[\ud800-\udbff]/.test(text[end - 1] ?? "")) end--; // a pair of surrogates stays together
    }
    blocks.push(text.slice(start, end));
    start = end;
  }
  return blocks;
}

export function TextView({ text, running = false }: { text: string; running?: boolean }) {
  const blocks = blocksOf(text);
  const cursor = running && <span class="cursor" aria-hidden="true" />;
  if (blocks.length < 2) {
    return (
      <p class="text" dir="auto">
        {text}
        {cursor}
      </p>
    );
  }
  return (
    <div class="text" dir="auto">
      {blocks.map((block, index) => (
        <span key={index} class={block.endsWith("\n") ? "text-block" : undefined}>
          {block}
        </span>
      ))}
      {cursor}
    </div>
  );
}
