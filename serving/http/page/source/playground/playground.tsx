/** The playground: up to four models, adapters or settings side by side on one prompt. */

import { useSignalEffect } from "@preact/signals";
import { useState } from "preact/hooks";

import { messageOf } from "../api";
import { modelsError, modelsLoaded, namesOf } from "../models";
import { say } from "../status";
import { Windowed } from "../windowed";
import { Prompts } from "../prompts/prompts";
import { TotalCost } from "./answer";
import { CodeDialog } from "./code_dialog";
import { Columns } from "./columns";
import { Composer } from "./composer";
import { Conversations } from "./conversations";
import { current } from "./conversation";
import { type TaskRequest, requestFor } from "./request";
import { SharedSettings, TaskChoice } from "./settings";
import { TurnView } from "./turn";

const ALWAYS_SHOWN = 10; // of the last turns; earlier ones only near the window
const TURN_HEIGHT = 260; // pixels, until it was seen
const TURN_ELEMENTS = 60;

export function Playground() {
  const [shown, show] = useState<TaskRequest | null>(null);
  useSignalEffect(chooseModels);
  const conversation = current.value;
  const { turns, task } = conversation;
  const showCode = (index: number, column: number, step: number) => {
    try {
      const request = requestFor(conversation, column, index, step);
      const seed = turns[index]?.answers[column]?.[step]?.peek().seed;
      if (seed !== null && seed !== undefined) request.body.seed = seed;
      show(request);
    } catch (error) {
      say(messageOf(error));
    }
  };
  const none = modelsLoaded.value && !modelsError.value && !namesOf(task).length;
  return (
    <div class="playground">
      <Conversations />
      <div class="work">
        <h1>Playground</h1>
        {modelsLoaded.value && modelsError.value && <p class="error">{modelsError.value}</p>}
        {none && <p class="error">This server has no model for this task that the key may use.</p>}
        <TaskChoice />
        <Columns />
        <SharedSettings />
        <Prompts />
        <ol class="turns" aria-label="Conversation">
          {turns.map((turn, index) => (
            <li class="turn" key={`${conversation.id} ${index}`}>
              <Windowed estimate={TURN_HEIGHT} cost={TURN_ELEMENTS} always={index >= turns.length - ALWAYS_SHOWN}>
                {() => (
                  <TurnView
                    turn={turn}
                    index={index}
                    isLast={index === turns.length - 1}
                    showCode={(column, step) => showCode(index, column, step)}
                  />
                )}
              </Windowed>
            </li>
          ))}
        </ol>
        <TotalCost />
        <Composer />
      </div>
      {shown && <CodeDialog request={shown} close={() => show(null)} />}
    </div>
  );
}

/** Give each column whose model is not served a model that is. */
function chooseModels(): void {
  const { columns, task } = current.value;
  const names = namesOf(task);
  if (!names.length || columns.every((one) => names.includes(one.model))) return;
  current.value = {
    ...current.value,
    columns: columns.map((one) => (names.includes(one.model) ? one : { ...one, model: names[0] as string })),
  };
}
