// What an application built on Vercel's AI SDK asks of a server; prints what it got as one JSON object.
//     MLFLOW_LLM_TEST_URL=http://… node client.mjs
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "server",
  baseURL: `${process.env.MLFLOW_LLM_TEST_URL}/v1`,
  apiKey: "x",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = {
  model: provider("assistant"),
  prompt: "What is the weather in Paris, in degrees Celsius?",
  temperature: 0,
  maxOutputTokens: 128,
  maxRetries: 0,
};
const report = Output.object({
  schema: z.object({ city: z.enum(["Paris", "Rome"]), sunny: z.boolean(), degrees: z.number().int().min(-50).max(50) }),
});
const weather = tool({
  description: "Find the weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const called = { ...asked, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(1) };

async function streamed(options) {
  const result = streamText({ ...options, onError: ({ error }) => { throw error; } });
  const text = [];
  for await (const part of result.textStream) text.push(part);
  return { text: text.join(""), usage: await result.usage, reason: await result.finishReason, result };
}

const text = await generateText(asked);
const stream = await streamed(asked);
const object = await generateText({ ...asked, output: report });
const streamedObject = await streamed({ ...asked, output: report });
const calls = await generateText(called);
const streamedCalls = await streamed(called);
// The tool's result goes back to the model, which then answers in words.
const answered = await generateText({
  ...asked,
  tools: { weather },
  messages: [{ role: "user", content: asked.prompt }, ...calls.response.messages],
  prompt: undefined,
});
let refused;
try {
  await generateText({ ...asked, topP: 7 });
} catch (error) {
  refused = { status: error.statusCode, message: error.message };
}

console.log(
  JSON.stringify({
    text: { text: text.text, usage: text.usage, reason: text.finishReason },
    stream: { text: stream.text, usage: stream.usage, reason: stream.reason },
    object: object.output,
    streamedObject: await streamedObject.result.output,
    calls: { calls: calls.toolCalls.map((c) => c.input), results: calls.toolResults.map((r) => r.output), reason: calls.finishReason },
    streamedCalls: (await streamedCalls.result.toolCalls).map((c) => c.input),
    answered: answered.usage,
    refused,
  }),
);
